"use strict";
// Draws the curves of the page and says their values where the pointer is. All text goes through textContent: names,
// words of events and values are a stranger's.

const data = JSON.parse(document.getElementById("data").textContent);
const state = { time: false, log: false, hidden: new Set(), at: null };
const LEFT = 74, RIGHT = 10, TOP = 24, AXIS = 22, LANE = 16;
const charts = [];

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function html(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Numbers and times for people.

function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) return (+value.toPrecision(4)).toExponential().replace("e+", "e");
  for (const [unit, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (size >= scale) return `${+(value / (unit === "k" ? 1e3 : scale)).toPrecision(4)}${unit}`;
  return String(+value.toPrecision(5));
}

function steps(value) { return Math.round(value).toLocaleString("en"); }

function duration(seconds) {
  if (seconds < 10 && seconds % 1) return `${+seconds.toFixed(1)}s`;
  const whole = Math.max(0, Math.round(seconds));
  const [d, h, m, s] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  if (d) return `${d}d ${h}h`;
  if (h) return `${h}h ${String(m).padStart(2, "0")}m`;
  return m ? `${m}m ${String(s).padStart(2, "0")}s` : `${s}s`;
}

// Scales.

function ticks(low, high, most, whole) { // from coarse to fine, until there are three
  if (!(high - low > 1e-300 && high - low < Infinity)) return [low];
  let found = [];
  for (let finer = 3 * Math.ceil(Math.log10(high - low)); found.length < 3 && (finer >= 0 || !whole); finer--) {
    const step = [1, 2, 5][((finer % 3) + 3) % 3] * 10 ** Math.floor(finer / 3);
    found = [];
    // Bounded: next to 2 ** 53 and above, one more is the same number.
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++) found.push(i * step);
  }
  found = [...new Set(found)];
  return found.length > most ? found.filter((_, i) => i % 2 === 0) : found;
}

function timeTicks(high, most) {
  const nice = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000];
  const step = nice.filter((each) => each <= high / 2).pop() || high / 2;
  let found = [];
  for (let i = 0; i * step <= high && found.length < 50; i++) found.push(i * step);
  while (found.length > Math.max(5, most)) found = found.filter((_, i) => i % 2 === 0);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const each of [1, 2, 5]) if (each * 10 ** power >= low && each * 10 ** power <= high) found.push(each * 10 ** power);
  return found.length > 2 && found.length < 12 ? found : ticks(low, high, 8);
}

function along(series) { // the places of a series' values on the axis
  if (series.points) return series.points.map((point) => (state.time ? point[1] : point[0]));
  const axis = data.axes[series.axis];
  return state.time ? axis.time : axis.to;
}

function domain() {
  let low = state.time ? 0 : Infinity, high = -Infinity;
  for (const axis of data.axes) {
    const places = state.time ? axis.time : axis.to;
    if (!places || !places.length) continue;
    low = Math.min(low, state.time ? 0 : axis.from[0]);
    high = Math.max(high, places[places.length - 1]);
  }
  for (const chart of data.charts)
    for (const series of chart.series)
      for (const point of series.points || []) {
        const place = state.time ? point[1] : point[0];
        if (place !== null) { low = Math.min(low, place); high = Math.max(high, place); }
      }
  return high >= low ? [low, high > low ? high : low + 1] : [0, 1];
}

function range(series, log) {
  let low = Infinity, high = -Infinity;
  const values = (each) => (each.points ? each.points.map((point) => point[2]) : [...(each.low || []), ...(each.high || []), ...each.mid]);
  for (const each of series)
    for (const value of values(each))
      if (value !== null && (!log || value > 0)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (high < low) return log ? [0.1, 1] : [0, 1];
  if (high === low) { const room = Math.abs(low) * 0.05 || 1; return log ? [low / 2, low * 2] : [low - room, high + room]; }
  if (log) return [low / 1.05, high * 1.05];
  const room = (high - low) * 0.04;
  return [low >= 0 && low < room * 12 ? 0 : low - room, high + room];
}

// Paths. A value that is not there breaks them.

function pieces(values) {
  const found = [];
  let begin = -1;
  for (let i = 0; i <= values.length; i++) {
    const there = i < values.length && values[i] !== null && Number.isFinite(values[i]);
    if (there && begin < 0) begin = i;
    if (!there && begin >= 0) { found.push([begin, i]); begin = -1; }
  }
  return found;
}

function line(xs, ys) {
  return pieces(ys).map(([from, end]) => {
    let path = "";
    for (let i = from; i < end; i++) path += `${i === from ? "M" : "L"}${xs[i].toFixed(1)} ${ys[i].toFixed(1)}`;
    return end - from === 1 ? `${path}h.1` : path;
  }).join("");
}

function area(xs, tops, bottoms) {
  return pieces(tops).map(([from, end]) => {
    let path = "";
    for (let i = from; i < end; i++) path += `${i === from ? "M" : "L"}${xs[i].toFixed(1)} ${tops[i].toFixed(1)}`;
    for (let i = end - 1; i >= from; i--) path += `L${xs[i].toFixed(1)} ${bottoms[i].toFixed(1)}`;
    return `${path}Z`;
  }).join("");
}

function drawSeries(plot, series, width, toX, toY) {
  const xs = along(series).map((place) => (place === null ? null : toX(place)));
  const ys = (values) => values.map((value) => (value === null ? null : toY(value)));
  if (series.points) {
    const values = ys(series.points.map((point) => point[2]));
    const there = xs.map((_, i) => i).filter((i) => xs[i] !== null && values[i] !== null && Number.isFinite(values[i]));
    plot.append(svg("path", { class: `curve s${series.colour}`, d: line(there.map((i) => xs[i]), there.map((i) => values[i])) }));
    if (there.length * 10 <= width)
      for (const i of there) plot.append(svg("circle", { class: `f${series.colour}`, cx: xs[i].toFixed(1), cy: values[i].toFixed(1), r: 2.5 }));
    return;
  }
  if (series.low) plot.append(svg("path", { class: `area f${series.colour}`, d: area(xs, ys(series.high), ys(series.low)) }));
  plot.append(svg("path", { class: `curve s${series.colour}${series.smooth ? " faint" : ""}`, d: line(xs, ys(series.mid)) }));
  if (series.smooth) plot.append(svg("path", { class: `curve s${series.colour}`, d: line(xs, ys(series.smooth)) }));
}

function drawAxes(plot, chart, width, height, toX, toY, across, up) {
  for (const value of chart.logged ? logTicks(...up) : ticks(...up, height > 200 ? 8 : 5)) {
    const y = toY(value);
    plot.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    plot.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, shown(+value.toPrecision(6))));
  }
  const most = Math.max(4, Math.floor((width - LEFT) / 90)), below = height + TOP + 15;
  for (const place of state.time ? timeTicks(across[1], most) : ticks(...across, most, true)) {
    const x = toX(place);
    plot.append(svg("text", { x, y: below, "text-anchor": x > width - 40 ? "end" : "middle" }, state.time ? duration(place) : steps(place)));
  }
  plot.append(svg("text", { x: LEFT - 6, y: below, "text-anchor": "end", class: "axis" }, state.time ? "time" : "step"));
  plot.append(svg("text", { x: 0, y: 11, class: "axis" }, chart.spec.unit));
}

function drawSpans(plot, lane, width, y, toX) { // an attempt from its first kept step to its last, with its ranks
  (lane.spans || []).forEach(([from, to, began, ended, label], i) => {
    const places = state.time ? [began, ended] : [from, to];
    if (places.includes(null)) return;
    const [x, end] = places.map((place) => Math.min(Math.max(toX(place), LEFT), width - RIGHT));
    plot.append(svg("rect", { class: `span${i % 2 ? " other" : ""}`, x, y: y - 7, width: Math.max(1, end - x), height: 14 }));
    if (end - x > 24 + 6 * label.length) plot.append(svg("text", { x: x + 8, y: y + 4, class: "said" }, label));
  });
}

function drawLanes(plot, chart, width, toX) {
  const below = TOP + chart.height + AXIS;
  chart.places = [];
  data.lanes.forEach((lane, row) => {
    const y = below + row * LANE + LANE / 2;
    plot.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, lane.name));
    plot.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    drawSpans(plot, lane, width, y, toX);
    for (const [step, time, words] of lane.marks) {
      const place = state.time ? time : step;
      if (place === null) continue;
      const x = Math.min(Math.max(toX(place), LEFT), width - RIGHT);
      if (lane.name === "attempts" && lane.marks.length < 60)
        plot.append(svg("line", { class: "attempt", x1: x, x2: x, y1: TOP, y2: TOP + chart.height }));
      const many = lane.marks.length > 60; // a row of saves would be a bar
      const mark = many
        ? svg("rect", { class: `mark ${lane.name}`, x: x - 0.5, y: y - 3, width: 1, height: 6 })
        : svg("circle", { class: `mark ${lane.name}`, cx: x, cy: y, r: 3.5 });
      mark.append(svg("title", {}, words));
      plot.append(mark);
      chart.places.push({ x, y, words });
    }
  });
}

function draw(chart) {
  const { spec, figure } = chart;
  const width = Math.max(240, figure.clientWidth);
  const lanes = spec.id === "loss" ? data.lanes.length : 0;
  chart.logged = state.log && (spec.id === "loss" || spec.id === "datasets" || spec.id === "grad_norm");
  const visible = spec.series.filter((each) => !state.hidden.has(key(spec, each)) && (!state.time || along(each)));
  const across = domain(), up = range(visible, chart.logged);
  const scale = chart.logged ? Math.log : (value) => value;
  const toX = (place) => LEFT + ((place - across[0]) / (across[1] - across[0])) * (width - LEFT - RIGHT);
  const toY = (value) => {
    if (chart.logged && value <= 0) return TOP + chart.height;
    return TOP + chart.height * (1 - (scale(value) - scale(up[0])) / (scale(up[1]) - scale(up[0])));
  };
  const height = TOP + chart.height + AXIS + lanes * LANE;
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title, tabindex: 0 });
  drawAxes(plot, chart, width, chart.height, toX, toY, across, up);
  for (const series of visible) drawSeries(plot, series, width, toX, toY);
  if (lanes) drawLanes(plot, chart, width, toX);
  chart.cursor = svg("line", { class: "cursor", y1: TOP, y2: TOP + chart.height, visibility: "hidden" });
  plot.append(chart.cursor);
  listen(plot, chart, width, across);
  chart.plot.replaceWith(plot);
  chart.plot = plot;
  chart.toX = toX;
  point(chart);
}

// Where the pointer is.

function nearest(places, at) {
  let low = 0, high = places.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(places[low - 1] - at) < Math.abs(places[low] - at) ? low - 1 : low;
}

function listen(plot, chart, width, across) {
  const move = (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) * width) / box.width, y = event.clientY - box.top;
    const part = Math.min(1, Math.max(0, (x - LEFT) / (width - LEFT - RIGHT)));
    state.at = across[0] + part * (across[1] - across[0]);
    say(chart, x, y);
    charts.forEach(point);
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", () => { state.at = null; charts.forEach(point); });
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const axis = data.axes[0], places = state.time ? axis.time : axis.to;
    if (!by || !places || !places.length) return;
    event.preventDefault();
    const now = state.at === null ? 0 : nearest(places, state.at) + by;
    state.at = places[Math.min(places.length - 1, Math.max(0, now))];
    charts.forEach(point);
  });
}

function say(chart, x, y) { // the words of the mark below the pointer
  if (!chart.places || !chart.places.length) return;
  const near = chart.places
    .map((place) => ({ ...place, far: Math.abs(place.x - x) + 3 * Math.abs(place.y - y) }))
    .sort((a, b) => a.far - b.far)[0];
  document.getElementById("words").textContent = near.far < 36 ? near.words : "";
}

function place(series, at) { // the value of a series there: [text, more, where]
  const places = along(series);
  if (!places || !places.length) return null;
  if (series.points) {
    const point = series.points[nearest(places, at)];
    return [shown(point[2]), ` (${steps(point[0])})`];
  }
  const i = nearest(places, at), axis = data.axes[series.axis];
  const wide = series.low && series.low[i] !== series.high[i];
  const where = axis.from[i] === axis.to[i] ? steps(axis.to[i]) : `${steps(axis.from[i])}–${steps(axis.to[i])}`;
  const when = axis.time ? ` · ${duration(axis.time[i])}` : "";
  return [shown(series.mid[i]), wide ? ` ${shown(series.low[i])} to ${shown(series.high[i])}` : "", `step ${where}${when}`];
}

function point(chart) { // the line at the pointer, and the values there
  const there = state.at !== null && chart.toX;
  chart.cursor.setAttribute("visibility", there ? "visible" : "hidden");
  let where = "";
  chart.spec.series.forEach((series, i) => {
    const found = there ? place(series, state.at) : null;
    chart.values[i][0].textContent = found ? ` ${found[0]}` : "";
    chart.values[i][1].textContent = found ? found[1] : "";
    if (found && found[2] && !where) where = found[2];
  });
  chart.at.textContent = where;
  if (!there) return;
  const x = chart.toX(state.at).toFixed(1);
  chart.cursor.setAttribute("x1", x);
  chart.cursor.setAttribute("x2", x);
}

// A curve as a file.

function taking(kind, take) {
  const button = html("button", "take", kind);
  button.type = "button";
  button.addEventListener("click", take);
  return button;
}

function csv(spec) { // a line for every point of every series
  const quoted = (text) => `"${String(text).replace(/^[=+\-@\t\r]/, "'$&").replace(/"/g, '""')}"`; // no formula of a stranger's
  const rows = [["series", "first_step", "step", "seconds", "value", "least", "greatest"].join()];
  const row = (name, ...values) => rows.push([quoted(name), ...values.map((value) => value ?? "")].join());
  for (const series of spec.series) {
    const name = series.name || spec.title, axis = data.axes[series.axis];
    for (const [step, seconds, value] of series.points || []) row(name, step, step, seconds, value, value, value);
    (series.mid || []).forEach((value, i) => row(name, axis.from[i], axis.to[i], axis.time && axis.time[i], value, (series.low || series.mid)[i], (series.high || series.mid)[i]));
  }
  return new Blob([rows.join("\n") + "\n"], { type: "text/csv" });
}

function save(chart, kind, blob) {
  const link = html("a");
  link.download = `${document.title} ${chart.spec.title}`.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 100) + `.${kind}`;
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function savePicture(chart) { // the plot as it is now, below its title and its legend
  const copy = chart.plot.cloneNode(true), from = [chart.plot, ...chart.plot.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((each, i) => { // an image does not have the page's style
    const style = getComputedStyle(from[i]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"]) each.setAttribute(name, style.getPropertyValue(name));
  });
  const [width, height] = [chart.plot.clientWidth, chart.plot.clientHeight], head = 44;
  copy.setAttribute("width", width);
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  const canvas = html("canvas"), style = getComputedStyle(document.body);
  Object.assign(canvas, { width: 2 * width, height: 2 * (height + head) });
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, width, height + head);
  pen.fillStyle = style.color;
  pen.font = `600 13px ${style.fontFamily}`;
  pen.fillText(`${document.title}: ${chart.spec.title}`, 6, 16, width - 12);
  pen.font = `12px ${style.fontFamily}`;
  let x = 6;
  for (const series of chart.spec.series) {
    pen.fillStyle = style.getPropertyValue(`--c${series.colour}`);
    pen.fillRect(x, 30, 10, 3);
    pen.fillStyle = style.color;
    pen.fillText(series.name || chart.spec.title, x + 14, 36);
    x += 28 + pen.measureText(series.name || chart.spec.title).width;
  }
  pen.drawImage(image, 0, head, width, height);
  canvas.toBlob((blob) => save(chart, "png", blob));
}

// Set up.

function key(spec, series) { // of runs that are compared, one is hidden in all charts
  return data.axes.length > 1 ? series.name : `${spec.id} ${series.name}`;
}

function legend(chart) {
  const list = html("div", "legend");
  chart.values = chart.spec.series.map((series) => {
    const button = html("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    const value = html("b"), more = html("span");
    button.append(html("i", `f${series.colour}${series.points ? " dot" : ""}`), series.name || chart.spec.title, value, more);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(key(chart.spec, series))) state.hidden.add(key(chart.spec, series));
      redraw();
    });
    chart.buttons.push([button, key(chart.spec, series)]);
    list.append(button);
    return [value, more];
  });
  if (chart.spec.left) list.append(html("span", "", `and ${chart.spec.left} more`));
  return list;
}

function redraw() {
  for (const chart of charts) {
    for (const [button, name] of chart.buttons) button.setAttribute("aria-pressed", String(!state.hidden.has(name)));
    draw(chart);
  }
}

function begin() {
  document.documentElement.classList.add("js");
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const spec = data.charts.find((each) => each.id === figure.dataset.chart);
    const chart = { spec, figure, height: spec.id === "loss" ? 300 : 130, buttons: [], values: [], plot: html("div") };
    const caption = html("figcaption");
    chart.at = html("span", "at");
    const takes = html("span", "takes");
    takes.append(taking("CSV", () => save(chart, "csv", csv(spec))), taking("PNG", () => savePicture(chart)));
    caption.append(html("b", "", spec.title), chart.at, takes);
    figure.replaceChildren(caption, legend(chart), chart.plot);
    charts.push(chart);
  }
  for (const [id, key, value] of [["by-step", "time", false], ["by-time", "time", true], ["linear", "log", false], ["log", "log", true]]) {
    const button = document.getElementById(id);
    if (!button) continue;
    button.addEventListener("click", () => {
      state[key] = value;
      state.at = null;
      for (const other of button.parentElement.querySelectorAll(`button[data-key="${key}"]`))
        other.setAttribute("aria-pressed", String(other === button));
      redraw();
    });
  }
  redraw();
  let width = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    redraw();
  });
}

begin();
