"use strict";
/* Runs the scripts of the page in Node, on a document that has only what they use, and by a clock of its own.
   Reads steps as JSON from stdin: {event, data}, {open: true}, {error: readyState}, {wait_s}, and {text} or {drawn}, an id.
   Writes as JSON what was asked for: the text of an element, null if it is hidden, or the tags and classes in it. */
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [folder] = process.argv.slice(2);
const html = fs.readFileSync(path.join(folder, "index.html"), "utf8");
let now = 1.8e12;
const ticking = [], streams = [];

class Node {
  constructor(tag) {
    this.tag = tag;
    this.children = [];
    this.attributes = new Map();
    this.listeners = {};
    this.dataset = {};
    this.style = { setProperty() {} };
    this.classList = { add: name => this.classes.add(name), remove: name => this.classes.delete(name) };
    this.classes = new Set();
    this.hidden = false;
    this.clientWidth = 1000;
    this.isConnected = true;
  }
  get textContent() { return this.children.map(each => typeof each === "string" ? each : each.textContent).join(""); }
  set textContent(text) { this.children = text ? [text] : []; }
  get parentElement() { return this.parent || new Node("none"); }
  get rows() { return this.children; }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
  }
  getAttribute(name) { return this.attributes.has(name) ? this.attributes.get(name) : null; }
  hasAttribute(name) { return this.attributes.has(name); }
  removeAttribute(name) { this.attributes.delete(name); }
  append(...children) {
    for (const each of children) {
      if (each instanceof Node) each.parent = this;
      this.children.push(each);
    }
  }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  insertRow() { this.append(new Node("tr")); return this.children.at(-1); }
  deleteRow() { this.children.pop(); }
  contains() { return false; }
  remove() { if (this.parent) this.parent.children = this.parent.children.filter(each => each !== this); }
  querySelectorAll() { return []; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  focus() {}
}

class EventSource {
  static CONNECTING = 0;
  static OPEN = 1;
  static CLOSED = 2;
  constructor() { this.readyState = 0; this.listeners = {}; streams.push(this); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  close() { this.readyState = 2; }
  emit(name, data) { if (this.listeners[name]) this.listeners[name]({ data }); }
}

class FakeDate extends Date {
  constructor(...given) { super(...(given.length ? given : [now])); }
  static now() { return now; }
}

const byId = new Map();
for (const [tag, name, id] of html.matchAll(/<([a-z0-9]+)\b[^>]*?\bid="([^"]+)"[^>]*>/g)) {
  byId.set(id, Object.assign(new Node(name), { hidden: / hidden\b/.test(tag) }));
}
const root = new Node("html");
root.dataset.inject = "yes";
const document = {
  documentElement: root, body: new Node("body"), activeElement: null, title: "",
  getElementById: id => byId.get(id),
  createElement: tag => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
};
const context = vm.createContext({
  document, EventSource, URLSearchParams, console, Date: FakeDate, location: { search: "?token=t" },
  ResizeObserver: class { observe() {} },
  setInterval: (act, every) => ticking.push({ act, every, next: now + every }),
});
for (const name of ["draw.js", "page.js"]) vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), context);

function advance(seconds) {
  const end = now + seconds * 1000;
  for (;;) {
    const due = ticking.filter(each => each.next <= end).sort((a, b) => a.next - b.next)[0];
    if (!due) break;
    now = due.next;
    due.next += due.every;
    due.act();
  }
  now = end;
}

function drawnIn(node) {
  const inner = node.children.filter(each => each instanceof Node);
  return inner.flatMap(each => [`${each.tag} ${each.getAttribute("class") || ""}`, ...drawnIn(each)]);
}

const said = [];
for (const step of JSON.parse(fs.readFileSync(0, "utf8"))) {
  const stream = streams.at(-1);
  if (step.open) { stream.readyState = 1; stream.emit("open"); }
  if ("error" in step) { stream.readyState = step.error; stream.emit("error"); }
  if (step.event) stream.emit(step.event, JSON.stringify(step.data));
  if (step.wait_s) advance(step.wait_s);
  if (step.text) said.push(byId.get(step.text).hidden ? null : byId.get(step.text).textContent);
  if (step.drawn) said.push(drawnIn(byId.get(step.drawn)));
}
process.stdout.write(JSON.stringify(said));
