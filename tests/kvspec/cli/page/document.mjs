// `node document.mjs PAGE DRIVER STEPS`: the driver's answer in a document of a few lines, where there is no browser.
// It has what the page uses and draws nothing.
import { readFileSync } from "node:fs";

const [page, driver, steps] = process.argv.slice(2);
const byId = new Map();

class Element extends EventTarget {
  constructor(name) {
    super();
    Object.assign(this, { tagName: name.toUpperCase(), attributes: {}, children: [], value: "" });
    this.style = { setProperty() {} };
    this.classList = { add: (word) => this.toggle(word, true), toggle: (word, on) => this.toggle(word, on) };
  }

  get dataset() {
    return { g: this.attributes["data-g"], i: this.attributes["data-i"] };
  }

  get textContent() {
    return this.parts.map((part) => (typeof part === "string" ? part : part.textContent)).join("");
  }

  set textContent(text) {
    this.replaceChildren(text);
  }

  parts = [];

  append(...parts) {
    this.parts.push(...parts.map((part) => (part instanceof Element ? part : String(part))));
    this.children = this.parts.filter((part) => part instanceof Element);
    if (this.tagName === "SELECT" && !this.value) this.value = this.children[0]?.attributes.value ?? "";
  }

  replaceChildren(...parts) {
    this.parts = [];
    this.append(...parts);
  }

  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "id") byId.set(String(value), this);
    if (name === "value") this.value = String(value);
  }

  getAttribute(name) {
    return this.attributes[name] ?? null;
  }

  toggle(word, on) {
    const words = (this.attributes.class ?? "").split(" ").filter((other) => other && other !== word);
    this.attributes.class = [...words, ...(on ? [word] : [])].join(" ");
  }

  focus() {
    document.activeElement = this;
  }
}

const html = readFileSync(page, "utf8");
for (const [, name, id] of html.matchAll(/<(\w+)[^>]*? id="([\w-]+)"/g)) new Element(name).setAttribute("id", id);
byId.get("data").textContent = /id="data">(.*?)<\/script>/s.exec(html)[1];
globalThis.document = {
  activeElement: null,
  getElementById: (id) => byId.get(id) ?? null,
  createElement: (name) => new Element(name),
  createElementNS: (space, name) => new Element(name),
};
const script = /<script type="module">(.*?)<\/script>/s.exec(html)[1];
await import(`data:text/javascript,${encodeURIComponent(script)}`);
console.log(JSON.stringify((0, eval)(`${readFileSync(driver, "utf8")}\ndrive(${steps})`)));
