"use strict";
// Controls, and what the planner says of a choice. Its figures come from the server that the page is from, or are inside
// of the page; here they are only written down. All text goes through textContent: names and errors are a stranger's.

const data = JSON.parse(document.getElementById("data").textContent);
const inside = data.points;
const GIB = 2 ** 30;
const choice = { ...data.start };
const run = { price: data.price, tokens: inside ? inside.tokens : null };
const PARTS = [
  ["weights", "weights"], ["gradients", "gradients"], ["optimizer", "optimizer's state"], ["gathered", "gathered from others"],
  ["activations", "activations"],
];
const at = (id) => document.getElementById(id);

function html(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Numbers for people.

const number = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const bytes = (value) => (value >= 0.05 * GIB ? `${number(value / GIB, 1)} GiB` : `${number(value / 2 ** 20)} MiB`);
const seconds = (value) => (value >= 1 ? `${number(value, 1)} s` : `${number(1000 * value, value < 0.01 && value > 0 ? 1 : 0)} ms`);
const duration = (hours) => (hours >= 1 ? `${number(hours, 1)} hours` : `${number(60 * hours)} minutes`);
const few = (value) => number(value, value < 10 ? 1 : 0);
const gpus = (count) => `${number(count)} GPU${count > 1 ? "s" : ""}`;

function words(name, value) {
  if (name === "method") return data.methods[value] || value;
  if (typeof value !== "number") return String(value).replace(/_/g, " ");
  return number(value);
}

// What can be chosen. Of models that are inside of the page, not every method and number of GPUs is.

function valuesOf(control) {
  if (inside && control.name === "gpus") return inside.grid[choice.model][choice.method].gpus;
  return control.values;
}

function offered(control, value) {
  return !(inside && control.name === "method") || value in inside.grid[choice.model];
}

function settle() {
  if (!inside) return;
  if (!(choice.method in inside.grid[choice.model])) choice.method = "lora";
  const sizes = inside.grid[choice.model][choice.method].gpus;
  const far = (size) => Math.abs(Math.log2(size / choice.gpus));
  choice.gpus = sizes.reduce((best, size) => (far(size) < far(best) ? size : best));
}

// Points: what the planner says of a choice.

function pointInside(chosen) {
  const found = inside.grid[chosen.model][chosen.method];
  const rows = found.points[inside.lengths.indexOf(chosen.seq_len)][inside.recompute.indexOf(chosen.recompute)][found.gpus.indexOf(chosen.gpus)];
  const point = {};
  const put = (names, row) => names.forEach((name, index) => {
    const keys = name.split("."), last = keys.pop();
    keys.reduce((place, key) => (place[key] = place[key] || {}), point)[last] = row[index];
  });
  put(inside.common, rows[0]);
  put(inside.of_device, rows[1 + inside.on.indexOf(chosen.device)]);
  point.memory.of = data.memory[chosen.device];
  point.hours = run.tokens / (point.tokens_per_second_per_gpu * point.gpus) / 3600;
  return { point };
}

async function ask(chosen, signal) {
  if (inside) return pointInside(chosen);
  const answer = await fetch(`point?${new URLSearchParams(chosen)}`, { signal });
  if (!answer.ok) return { problem: (await answer.text()).trim() };
  return answer.json();
}

// The answer.

function partsOf(point) {
  const { peak, on_host: host = [], assumed } = point.memory;
  const found = PARTS.filter(([name]) => peak[name] && !host.includes(name)).map(([name, label]) => [name, label, peak[name]]);
  for (const [name, size] of Object.entries(assumed)) found.push([name.startsWith("back") ? "back" : "assumed", `${name} (assumed)`, size]);
  return found.filter((part) => part[2] > 0);
}

// What the bar does not have: it looks like a mistake if nothing says so.
function awayOf(point) {
  const { peak, on_host: host = [] } = point.memory;
  return PARTS.filter(([name]) => !peak[name] || host.includes(name)).map(([name, label]) => [name, label, peak[name] ? `${bytes(peak[name])} on the host` : "none at the peak"]);
}

function bar(point, width, height, labels) {
  const limit = point.memory.of, top = labels ? 16 : 0, wide = width - 4;
  const scale = wide / Math.max(limit * (labels ? 1.04 : 1), point.needed_bytes);
  const made = svg("svg", { viewBox: `0 0 ${width} ${height + top}`, height: height + top, "aria-hidden": "true" });
  made.append(svg("rect", { class: "track", x: 0, y: top, width: limit * scale, height, rx: 2 }));
  let x = 0;
  for (const [name, label, size] of partsOf(point)) {
    const part = svg("rect", { class: name, x, y: top, width: Math.max(0.5, size * scale - (labels ? 0.8 : 0)), height });
    if (labels) part.append(svg("title", {}, `${label}: ${bytes(size)}`));
    made.append(part);
    x += size * scale;
  }
  const line = limit * scale;
  made.append(svg("line", { class: "limit", x1: line, x2: line, y1: top - (labels ? 3 : 0), y2: top + height }));
  if (labels) made.append(svg("text", { x: line, y: 9, "text-anchor": line > width / 3 ? "end" : "start" }, `${bytes(limit)} of ${choice.device}`));
  return made;
}

function price(point) { return run.price === null ? null : point.hours * point.gpus * run.price; }

function show(answer) {
  const { point, problem } = answer, verdict = at("verdict");
  for (const id of ["bar", "parts", "facts", "advice", "most"]) at(id).replaceChildren();
  if (problem) {
    verdict.className = "not";
    verdict.textContent = problem;
    return;
  }
  verdict.className = "";
  const badge = html("b", point.fits ? "fits" : "not", point.fits ? "fits" : `${bytes(point.needed_bytes - point.memory.of)} too much`);
  verdict.replaceChildren(`${bytes(point.needed_bytes)} of ${bytes(point.memory.of)} on each of ${gpus(point.gpus)}: `, badge);
  if (point.gpus === 1) verdict.firstChild.textContent = `${bytes(point.needed_bytes)} of ${bytes(point.memory.of)}: `;
  at("bar").append(bar(point, Math.max(280, at("bar").clientWidth), 34, true));
  for (const [name, label, size] of [...partsOf(point), ...awayOf(point)]) at("parts").append(html("li", "", html("i", name), label, html("span", "n", typeof size === "number" ? bytes(size) : size)));
  at("most").textContent = `Peak: ${point.memory.where}.`;
  for (const [label, value, more] of factsOf(point)) at("facts").append(html("div", "", html("dt", "", label), html("dd", "", value, html("small", "", more))));
  for (const note of point.advice || []) at("advice").append(html("li", "", `${note.text} (${note.source})`));
}

function factsOf(point) {
  const [low, high] = point.step_seconds_between, cost = price(point), { host, storage } = point;
  const kept = storage.total === undefined ? "weights that are trained, and optimizer" : `${bytes(storage.total)} at a time at most${storage.by_clock ? `, and ${storage.by_clock} more by the clock where there is room` : ""}`;
  const found = [
    ["Tokens a second and GPU", number(point.tokens_per_second_per_gpu), `MFU ${number(100 * point.mfu, 1)} %, ${point.bound}-bound`],
    ["Time of a step", seconds(point.step_seconds), `${seconds(low)} to ${seconds(high)} in half of published runs`],
    ["Spent in a step on", `${seconds(point.compute_seconds)} computing`, `${seconds(point.moving_seconds)} moving weights and gradients, partly at the same time; ${seconds(point.update_seconds)} updating`],
    ["Time of the run", duration(point.hours), `${few(point.hours * point.gpus)} GPU-hours`],
  ];
  if (cost !== null) found.push(["Price", few(cost), `at ${run.price} a GPU-hour`]);
  found.push(["Main memory of a machine", bytes(host.loading), `beside its GPUs', while loading; ${bytes(host.saving)} while saving`]);
  found.push(["A checkpoint", bytes(storage.checkpoint), kept]);
  const moved = (size) => `${number(size / 1e9, 1)} GB`;
  if (point.bytes_between) found.push(["Moved in a step", `${moved(point.bytes_between)} a machine`, `to others; ${moved(point.bytes_inside)} a GPU inside of one`]);
  else if (point.bytes_inside) found.push(["Moved in a step", `${moved(point.bytes_inside)} a GPU`, "to the others of its machine"]);
  return found;
}

// Tables of the same choice on other numbers of GPUs, and on other GPUs.

// On a narrow screen those called "wide" are left out, so that hours and price are there without scrolling.
const COLUMNS = [
  ["memory", (point) => bytes(point.needed_bytes), ""], ["", (point) => bar(point, 150, 10, false), "drawn wide"],
  ["fits", (point) => html("span", point.fits ? "fits" : "not", point.fits ? "yes" : "no"), ""],
  ["tokens/s/GPU", (point) => number(point.tokens_per_second_per_gpu), "wide"], ["MFU", (point) => `${number(100 * point.mfu, 1)} %`, "wide"],
  ["hours", (point) => number(point.hours, point.hours < 1 ? 2 : 1), ""], ["GPU-hours", (point) => few(point.hours * point.gpus), ""],
  ["price", (point) => few(price(point)), ""],
];
const columns = () => (run.price === null ? COLUMNS.slice(0, -1) : COLUMNS);

function begin(id, name, values) {
  const control = data.controls.find((each) => each.name === name);
  const head = html("tr", "", html("th", "", control.label), ...columns().map(([title, , kind]) => html("th", kind, title)));
  const body = values.map((value) => {
    const row = html("tr", ""), button = html("button", "", words(name, value));
    button.type = "button";
    button.addEventListener("click", () => { choice[name] = value; moved(); });
    row.append(html("td", "", button), ...columns().map(([, , kind], index) => html("td", kind, index ? "" : "…")));
    if (value === choice[name]) row.setAttribute("aria-current", "true");
    return [value, row];
  });
  const focused = at(id).contains(document.activeElement) ? document.activeElement.textContent : null;
  at(id).replaceChildren(html("thead", "", head), html("tbody", "", ...body.map(([, row]) => row)));
  for (const [, row] of body) if (row.querySelector("button").textContent === focused) row.querySelector("button").focus();
  return body;
}

async function fill(rows, name, chosen, signal) {
  for (const [value, row] of rows) {
    const { point, problem } = await ask({ ...chosen, [name]: value }, signal);
    if (signal.aborted) return;
    const cells = [...row.children].slice(1);
    if (problem) {
      const why = html("td", "why", problem);
      why.colSpan = cells.length;
      why.title = problem;
      row.replaceChildren(row.children[0], why);
      continue;
    }
    if (!point.fits) row.classList.add("quiet");
    columns().forEach(([, text], index) => cells[index].replaceChildren(text(point)));
  }
}

// One choice after another.

let going = new AbortController(), waiting = 0, writing = 0, drawn = null;

async function answer() {
  going.abort();
  going = new AbortController();
  const { signal } = going, chosen = { ...choice };
  if (!inside) at("answer").setAttribute("aria-busy", "true");
  try {
    const found = await ask(chosen, signal);
    if (signal.aborted) return;
    drawn = found;
    show(found);
    at("answer").setAttribute("aria-busy", "false");
    const sizes = begin("by-gpus", "gpus", valuesOf(data.controls.find((each) => each.name === "gpus")));
    const devices = [...new Set([...data.compared, chosen.device])];
    const others = begin("by-device", "device", devices);
    await fill(sizes, "gpus", chosen, signal);
    await fill(others, "device", chosen, signal);
  } catch (error) {
    if (signal.aborted) return;
    show({ problem: "The server of this page does not answer: is the command still running?" });
    at("answer").setAttribute("aria-busy", "false");
  }
}

function moved() {
  settle();
  write();
  clearTimeout(writing); // browsers refuse a hundred addresses in a few seconds
  writing = setTimeout(() => history.replaceState(null, "", `#${new URLSearchParams(hash())}`), 200);
  clearTimeout(waiting);
  if (inside) answer();
  else { at("answer").setAttribute("aria-busy", "true"); waiting = setTimeout(answer, 250); } // a slider passes by many
}

// The choice in the address, so that it can be sent to others.

function hash() {
  const found = { ...choice };
  if (run.price !== null) found.price = run.price;
  if (run.tokens !== null) found.tokens = run.tokens;
  return found;
}

function readHash() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const { name, values } of data.controls) {
    const value = values.find((each) => String(each) === asked.get(name));
    if (value !== undefined) choice[name] = value;
  }
  for (const name of ["price", "tokens"]) {
    const value = Number(asked.get(name));
    if (asked.get(name) && (name === "price" || inside) && value >= 0 && value < Infinity && (value || name === "price")) run[name] = value;
  }
  settle();
}

// Controls.

function write() {
  for (const control of data.controls) {
    const { name, kind } = control, values = valuesOf(control), value = choice[name], place = at(`c-${name}`);
    if (kind === "slider") {
      const input = at(name);
      input.max = values.length - 1;
      input.value = values.indexOf(value);
      input.setAttribute("aria-valuetext", words(name, value));
      place.querySelector("output").textContent = words(name, value);
    } else if (kind === "list") at(name).value = String(value);
    else for (const input of place.querySelectorAll("input")) {
      input.checked = input.value === String(value);
      input.disabled = !offered(control, input.value);
    }
  }
  for (const [name, scale] of [["price", 1], ["tokens", 1e6]])
    if (at(name) && document.activeElement !== at(name)) at(name).value = run[name] === null ? "" : run[name] / scale;
}

function build(control) {
  const { name, kind, values } = control, choose = (value) => { choice[name] = value; moved(); };
  if (kind === "slider") return at(name).addEventListener("input", (event) => choose(valuesOf(control)[Number(event.target.value)]));
  if (kind === "list") {
    for (const value of values) at(name).append(new Option(name === "strategy" ? words(name, value) : value, value));
    return at(name).addEventListener("change", (event) => choose(event.target.value));
  }
  for (const value of values) {
    const input = html("input", "");
    Object.assign(input, { type: "radio", name, value });
    input.addEventListener("change", () => choose(value));
    at(`c-${name}`).querySelector(".buttons").append(html("label", "", input, html("span", "", words(name, value))));
  }
}

function numberField(name, scale, least) {
  const field = at(name);
  if (field) field.addEventListener("input", () => {
    const value = field.value === "" ? null : Number(field.value) * scale;
    if (value === null ? name === "price" : value >= least) { run[name] = value; moved(); }
  });
}

data.controls.forEach(build);
numberField("price", 1, 0);
numberField("tokens", 1e6, 1);
at("controls").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", () => { readHash(); write(); answer(); });
window.addEventListener("resize", () => { if (drawn) show(drawn); });
readHash();
write();
answer();
