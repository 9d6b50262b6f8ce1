"use strict";
// Chooses and sorts the rows of the page, which are all there already, and draws its sweeps. All text goes through
// textContent: names and values are a stranger's.

const table = document.querySelector("table.runs");
const rows = table ? [...table.querySelectorAll("tbody tr")] : [];
const states = [...document.querySelectorAll("button[data-state]")];
const lists = [...document.querySelectorAll("select[data-by]")];
const find = document.getElementById("find");

function choose() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = states.filter((each) => each.getAttribute("aria-pressed") === "true").map((each) => each.dataset.state);
  let left = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(
      words.every((word) => text.includes(word)) &&
      (!wanted.length || wanted.includes(row.dataset.state)) &&
      lists.every((list) => !list.value || row.dataset[list.dataset.by] === list.value)
    );
    left += !row.hidden;
  }
  document.getElementById("found").textContent = `${left} of ${rows.length} runs`;
}

function sort(head, column) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const each of head.parentElement.children) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.children[column].dataset.sort ?? row.children[column].textContent.trim();
  const compared = (a, b) => (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b, "en", { numeric: true }));
  rows.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last, either way
    return down ? compared(b, a) : compared(a, b);
  });
  table.querySelector("tbody").append(...rows);
}

function beginRows() {
  find.addEventListener("input", choose);
  for (const list of lists) list.addEventListener("change", choose);
  for (const button of states)
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      choose();
    });
  [...table.querySelectorAll("thead th")].forEach((head, column) => {
    if (head.textContent === "curve") return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(head, column));
    head.replaceChildren(button);
  });
  choose();
}

// Sweeps in parallel coordinates: an axis for each field and one for the metric, a line for each trial. Places on an axis
// are from 0 to 1. Where there is no room side by side, as on a phone, the axes lie one below the other.

const LEFT = 84, TOP = 34, HIGH = 220, BELOW = 66, NARROW = 110, REACH = 24;
const sweeps = [];

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function fit(node, words, room, end) { // cut at its end, or at its beginning: the last parts of a field's name say the most
  node.textContent = words;
  let most = words.length;
  for (let long; most > 1 && (long = node.getComputedTextLength()) > room; ) {
    most = Math.max(1, Math.min(most - 1, Math.floor((most * room) / long)));
    node.textContent = end ? `${words.slice(0, most)}…` : `…${words.slice(-most)}`;
  }
  if (most < words.length) node.append(svg("title", {}, words));
}

function layout(spec, width) {
  const many = spec.axes.length, apart = (width - 2 * LEFT) / Math.max(1, many - 1), lies = apart < NARROW;
  const at = lies
    ? (axis, place) => [8 + place * (width - 16), TOP + axis * BELOW]
    : (axis, place) => [LEFT + axis * apart, TOP + (1 - place) * HIGH];
  return { lies, apart, at, width, height: lies ? TOP + (many - 1) * BELOW + 24 : TOP + HIGH + 14 };
}

function drawAxis(plot, axis, number, last, { lies, apart, at, width }) {
  const [x1, y1] = at(number, 0), [x2, y2] = at(number, 1);
  plot.append(svg("line", { class: "scale", x1, y1, x2, y2 }));
  const name = svg("text", { class: "axis", ...(lies ? { x: 0, y: y1 - 10 } : { x: x1, y: 14, "text-anchor": "middle" }) });
  plot.append(name);
  fit(name, axis.name, lies ? width : Math.min(apart - 12, 2 * LEFT), false);
  const every = Math.ceil(axis.ticks.length / (lies ? 8 : 16));
  let before = lies ? -Infinity : Infinity;
  axis.ticks.filter((_, i) => i % every === 0).forEach(([place, words], i, all) => {
    const [x, y] = at(number, place);
    if (!lies && y > before - 13) return; // it would be on the one below it
    const mark = svg("text", lies ? { y: y + 16 } : { x: last ? x + 8 : x - 8, y: y + 4, "text-anchor": last ? "start" : "end" });
    plot.append(mark);
    fit(mark, words, lies ? Math.max(60, width / all.length - 12) : last || !number ? LEFT - 10 : apart - 24, true);
    if (lies) {
      const long = mark.getComputedTextLength(), from = Math.min(Math.max(0, x - long / 2), width - long);
      if (from < before) return mark.remove();
      mark.setAttribute("x", from);
      before = from + long + 8;
    } else before = y;
    plot.append(svg("line", { class: "scale", ...(lies ? { x1: x, x2: x, y1: y, y2: y + 4 } : { x1: last ? x : x - 4, x2: last ? x + 4 : x, y1: y, y2: y }) }));
  });
}

function path(points) {
  let found = "", pen = "M";
  for (const point of points) {
    if (point) found += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = point ? "L" : "M";
  }
  return points.filter(Boolean).length === 1 ? `${found}h.1` : found;
}

function drawSweep(sweep) {
  const { figure, spec } = sweep, width = figure.clientWidth;
  if (!width || width === sweep.width) return; // it is folded up, or as wide as before
  sweep.width = width;
  const room = layout(spec, width), { height } = room;
  const label = `${spec.name}: ${spec.lines.length} trials over ${spec.axes.map((axis) => axis.name).join(", ")}. The arrow keys go from trial to trial, the best first; Enter marks a trial's row.`;
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label, tabindex: 0 });
  sweep.points = spec.lines.map((line) => line.at.map((place, axis) => (place === null ? null : room.at(axis, place))));
  sweep.paths = sweep.points.map(path);
  for (let i = spec.lines.length - 1; i >= 0; i--) // the best on top
    plot.append(svg("path", { class: `curve ${colour(spec.lines[i])}${spec.lines[i].best ? " best" : ""}`, d: sweep.paths[i] }));
  sweep.over = ["kept", "near"].map((kind) => svg("path", { class: kind, d: "" }));
  plot.append(...sweep.over);
  sweep.plot.replaceWith(plot);
  sweep.plot = plot;
  spec.axes.forEach((axis, i) => drawAxis(plot, axis, i, i === spec.axes.length - 1, room));
  listen(plot, sweep, width);
  show(sweep);
}

function colour(line) { return line.grade === null ? "none" : `v${line.grade}`; }

// The trial at the pointer or under the arrow keys, and the one that is kept.

function far(x, y, a, b) { // from a point to a piece of a line
  const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
  const part = Math.min(1, Math.max(0, ((x - a[0]) * dx + (y - a[1]) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(a[0] + part * dx - x, a[1] + part * dy - y);
}

function nearest(sweep, x, y) {
  let [found, least] = [null, REACH];
  sweep.points.forEach((points, i) => {
    points.forEach((point, k) => {
      const other = points[k + 1] || point;
      const away = point ? far(x, y, point, other) : Infinity;
      if (away < least) [found, least] = [i, away];
    });
  });
  return found;
}

function listen(plot, sweep, width) {
  const move = (event) => {
    const box = plot.getBoundingClientRect();
    show(sweep, nearest(sweep, ((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * width) / box.width));
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", () => show(sweep));
  plot.addEventListener("click", () => keep(sweep, sweep.near));
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) show(sweep, Math.min(sweep.spec.lines.length - 1, Math.max(0, (sweep.near ?? sweep.kept ?? -1) + by)));
    else if (event.key === "Enter" || event.key === " ") keep(sweep, sweep.near ?? sweep.kept);
    else if (event.key === "Escape") { sweep.near = null; keep(sweep, null); }
    else return;
    event.preventDefault();
  });
}

function keep(sweep, number) { // one on the page, and its row; the same once more: none
  const again = number === sweep.kept;
  for (const other of sweeps) if (other !== sweep && other.kept !== null) { other.kept = null; show(other); }
  sweep.kept = again ? null : number;
  show(sweep, sweep.near);
  const row = sweep.kept === null ? null : rowOf(sweep.spec.lines[sweep.kept]);
  for (const each of rows) {
    each.classList.toggle("chosen", each === row);
    if (each === row) each.setAttribute("aria-current", "true"); else each.removeAttribute("aria-current");
  }
}

function rowOf(line) { return line.row === null ? null : document.getElementById(`run-${line.row}`); }

function show(sweep, near = null) {
  const { spec, kept } = sweep, now = near ?? kept;
  sweep.near = near;
  if (!sweep.over) return; // it has not been drawn yet
  [kept, near].forEach((number, i) => {
    sweep.over[i].setAttribute("class", `curve ${i ? "near" : "kept"} ${number === null ? "" : colour(spec.lines[number])}`);
    sweep.over[i].setAttribute("d", number === null ? "" : sweep.paths[number]);
  });
  sweep.plot.classList.toggle("picked", now !== null);
  sweep.says.textContent = now === null ? "Point at a line, or use the arrow keys; a click or Enter keeps it and marks its row." : spec.lines[now].words;
  if (kept === null || now !== kept) return;
  const link = document.createElement("a");
  link.href = `#run-${spec.lines[kept].row}`;
  link.textContent = "its row";
  if (spec.lines[kept].row === null) sweep.says.append(" (its run is not in this storage)");
  else sweep.says.append(" (", link, ")");
}

function legend() {
  const made = document.createElement("figcaption"), list = document.createElement("span");
  list.className = "legend";
  const marks = [0, 1, 2, 3, 4, 5].map((grade) => {
    const mark = document.createElement("i");
    mark.className = `v${grade}`;
    return mark;
  });
  list.append("best ", ...marks, " worst");
  made.append(list);
  return made;
}

function beginSweep(figure, spec) {
  const says = document.createElement("p"), plot = document.createElement("div");
  const sweep = { figure, spec, says, plot, near: null, kept: null, width: 0 };
  says.className = "words";
  says.setAttribute("role", "status");
  figure.replaceChildren(legend(), plot, says);
  sweeps.push(sweep);
  new ResizeObserver(() => drawSweep(sweep)).observe(figure); // also when it is unfolded
}

document.documentElement.classList.add("js");
if (find) beginRows();
const data = JSON.parse(document.getElementById("data").textContent);
for (const figure of document.querySelectorAll("figure[data-sweep]")) beginSweep(figure, data.sweeps[figure.dataset.sweep]);
