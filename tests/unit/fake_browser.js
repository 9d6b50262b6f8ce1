// Runs the script of a page on as much of a document as it uses, points at curves and presses buttons.
// node fake_browser.js PAGE WIDTH -> JSON: the texts that are there then, every attribute that is not a number, the texts
// of every plot with their places, and the first curve as CSV.
"use strict";
const html = require("fs").readFileSync(process.argv[2], "utf8");
const width = Number(process.argv[3]);

class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], listeners: {}, text: "", parentElement: null, dataset: {} }); this.classList = { add() {} }; }
  get clientWidth() { return width; }
  set textContent(text) { this.text = String(text); this.children = []; }
  get textContent() { return this.text + this.children.map((each) => (typeof each === "string" ? each : each.textContent)).join(""); }
  click() {}
  append(...nodes) { for (const node of nodes) { if (node instanceof Element) node.parentElement = this; this.children.push(node); } }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  replaceWith(node) { const all = this.parentElement.children; all[all.indexOf(this)] = node; node.parentElement = this.parentElement; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, call) { this.listeners[name] = call; }
  getBoundingClientRect() { return { left: 0, top: 0, width }; }
  querySelectorAll() { return this.all().filter((each) => each.tag === "button"); }
  all() { return [this, ...this.children.filter((each) => each instanceof Element).flatMap((each) => each.all())]; }
}

const byId = {};
for (const [, id] of html.matchAll(/ id="([\w-]+)"/g)) { byId[id] = new Element("button"); byId[id].parentElement = new Element("div"); }
byId.data.textContent = html.match(/<script type="application\/json" id="data">(.*?)<\/script>/s)[1];
const figures = [...html.matchAll(/data-chart="(\w+)"/g)].map(([, name]) => { const made = new Element("figure"); made.dataset.chart = name; return made; });
globalThis.window = { addEventListener() {} };
globalThis.setTimeout = () => {};
let taken = null;
URL.createObjectURL = (blob) => { taken = blob; return ""; };
globalThis.document = {
  title: "page",
  documentElement: new Element("html"), getElementById: (id) => byId[id] || null, createElement: (tag) => new Element(tag),
  createElementNS: (space, tag) => new Element(tag), querySelectorAll: () => figures,
};
new Function(html.match(/<script>(.*)<\/script>/s)[1])();

const everything = () => figures.flatMap((each) => each.all());
const plot = (figure) => figure.all().find((each) => each.tag === "svg");
const seen = [], wrong = [], marks = [];
const look = () => {
  for (const each of everything())
    for (const [name, value] of Object.entries(each.attributes)) if (/NaN|Infinity|undefined/.test(value)) wrong.push(`${each.tag} ${name}=${value}`);
  seen.push(figures.map((each) => each.textContent).join("\n"));
};
look();
let paths = [];
const textsOf = () => figures.map((each) => [each.dataset.chart, plot(each).all().filter((one) => one.tag === "text")
  .map((one) => ({ ...one.attributes, x: Number(one.attributes.x), y: Number(one.attributes.y), text: one.textContent }))]);
const texts = Object.fromEntries(textsOf());
if (figures.length) {
  const first = () => plot(figures[0]);
  paths = first().all().filter((each) => each.tag === "path").map((each) => [each.attributes.class, each.attributes.d]);
  for (const mark of first().all().filter((each) => /^mark/.test(each.attributes.class || ""))) {
    const [x, y] = mark.tag === "circle" ? ["cx", "cy"] : ["x", "y"];
    first().listeners.pointermove({ clientX: Number(mark.attributes[x]), clientY: Number(mark.attributes[y]) });
    marks.push([mark.attributes.class, byId.words.textContent]);
  }
  first().listeners.pointermove({ clientX: width / 2, clientY: 40 });
  look();
  for (const id of ["log", "by-time"]) if (byId[id] && byId[id].listeners.click) { byId[id].listeners.click(); look(); }
  first().listeners.keydown({ key: "ArrowRight", preventDefault() {} });
  const buttons = figures.flatMap((each) => each.querySelectorAll());
  buttons.find((each) => each.textContent === "CSV").listeners.click();
  buttons.filter((each) => each.className !== "take").forEach((each) => each.listeners.click());
  look();
}
Promise.resolve(taken ? taken.text() : "").then((csv) =>
  console.log(JSON.stringify({ seen, wrong, marks, paths, texts, csv, figures: figures.map((each) => each.dataset.chart) })));
