// Compact values of the vectors, from spec/vectors/README.md alone. `node compact_values.js FILE...` makes the inputs of
// each test that has `made`, and prints a line of JSON: the file, the tcId, and what `made` should be.
"use strict";
const fs = require("fs");
const M = (1n << 64n) - 1n;

function mix(z) {
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & M;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & M;
  return z ^ (z >> 31n);
}
const word = (seed, t) => mix((seed + BigInt(t) * 0x9e3779b97f4a7c15n) & M);
const words = (seed, count) => Array.from({ length: count }, (_, at) => word(BigInt(seed), at + 1));

// An array is {shape, flat}; integers are BigInt, floats are numbers.
function float(text) {
  const named = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  if (text in named) return named[text];
  const [, sign, lead, rest, power] = /^(-?)0x([01])\.([0-9a-f]+)p([+-]\d+)$/.exec(text);
  const digits = Number(BigInt("0x" + lead + rest)) * 2 ** (-4 * rest.length);
  return (sign ? -1 : 1) * digits * 2 ** Number(power);
}
function scalar(x) {
  if (typeof x === "number") return BigInt(x);
  if (typeof x !== "string") return x;
  return /^-?\d+$/.test(x) ? BigInt(x) : /\//.test(x) ? x : float(x);
}
const size = (shape) => shape.reduce((a, b) => a * b, 1);
const isObject = (x) => x !== null && typeof x === "object" && !Array.isArray(x);

function array(value, inputs) {
  if (isObject(value)) return forms[value.form](value, inputs);
  if (!Array.isArray(value)) return { shape: [], flat: [scalar(value)] };
  const parts = value.map((x) => array(x, inputs));
  return { shape: [parts.length, ...(parts[0] || { shape: [] }).shape], flat: parts.flatMap((x) => x.flat) };
}
function joined(parts, axis) {
  const shape = [...parts[0].shape];
  shape[axis] = parts.reduce((total, x) => total + x.shape[axis], 0);
  const outer = size(shape.slice(0, axis));
  const flat = [];
  for (let o = 0; o < outer; o++) {
    for (const x of parts) {
      const width = x.flat.length / outer;
      for (let at = o * width; at < (o + 1) * width; at++) flat.push(x.flat[at]);
    }
  }
  return { shape, flat };
}
const fraction = (w, bits) => Number(w >> BigInt(64 - bits)) * 2 ** -bits;

const forms = {
  integers: (f) => ({
    shape: f.shape,
    flat: words(f.seed, size(f.shape)).map((w) => BigInt(f.low) + (w % (BigInt(f.high) - BigInt(f.low)))),
  }),
  fractions: (f) => ({ shape: f.shape, flat: words(f.seed, size(f.shape)).map((w) => fraction(w, f.bits)) }),
  permutation: (f) => {
    const w = words(f.seed, f.n);
    const order = [...w.keys()].sort((a, b) => (w[a] < w[b] ? -1 : w[a] > w[b] ? 1 : a - b));
    return { shape: [f.n], flat: order.map(BigInt) };
  },
  choice: (f) => ({
    shape: f.shape,
    flat: words(f.seed, size(f.shape)).map((w) => scalar(f.of[Number(w % BigInt(f.of.length))])),
  }),
  runs: (f) => {
    const rows = f.of.map(([value, count]) => [array(value), count]);
    const flat = [];
    for (const [row, count] of rows) for (let at = 0; at < count; at++) flat.push(...row.flat);
    return { shape: [rows.reduce((n, [, count]) => n + count, 0), ...rows[0][0].shape], flat };
  },
  sums: (f, inputs) => {
    const flat = [scalar(f.start)];
    for (const x of array(f.of, inputs).flat) flat.push(flat[flat.length - 1] + x);
    return { shape: [flat.length], flat };
  },
  joined: (f, inputs) => joined(f.of.map((x) => array(x, inputs)), f.axis),
  neighbours: (f) => {
    const [n, k] = f.shape;
    const flat = [];
    words(f.seed, n).forEach((w, i) => {
      const s = Number(w % BigInt(f.steps.length));
      const row = [];
      for (let at = 0; at < f.steps.length && row.length < k; at++) {
        const j = i + f.steps[(s + at) % f.steps.length];
        const [mine, other] = [Math.floor(i / f.C), Math.floor(j / f.C)];
        if (j >= 0 && j < n && (f.earlier ? other < mine : other === mine)) row.push(BigInt(j) + scalar(f.start));
      }
      for (let at = 0; at < k; at++) flat.push(at < row.length ? row[at] : -1n);
    });
    return { shape: f.shape, flat };
  },
  falling: (f, inputs) => {
    const lists = inputs[f.along];
    const k = lists.shape[1];
    const drawn = words(f.seed, lists.flat.length).map((w) => fraction(w, f.bits));
    const flat = [];
    for (let at = 0; at < drawn.length; at += k) flat.push(...drawn.slice(at, at + k).sort((a, b) => b - a));
    return { shape: lists.shape, flat: flat.map((x, at) => (lists.flat[at] < 0n ? 0 : x)) };
  },
  signs: (f, inputs) => {
    const { shape, flat } = array(f.of, inputs);
    const scale = float(f.scale);
    const places = Array.from({ length: f.bits }, (_, c) => BigInt(c));
    return { shape: [...shape, f.bits], flat: flat.flatMap((x) => places.map((c) => ((x >> c) & 1n ? scale : -scale))) };
  },
};

const view = new DataView(new ArrayBuffer(8));
function bits(x) {
  if (typeof x === "bigint") return x & M;
  if (typeof x === "boolean") return x ? 1n : 0n;
  if (Number.isNaN(x)) return 0x7ff8000000000000n;
  view.setFloat64(0, x);
  return view.getBigUint64(0);
}
const digest = (flat) => flat.reduce((total, x, at) => (total + word(bits(x), at + 1)) & M, 0n).toString(16).padStart(16, "0");

for (const path of process.argv.slice(2)) {
  for (const group of JSON.parse(fs.readFileSync(path, "utf8")).testGroups) {
    for (const test of group.tests.filter((t) => t.made)) {
      const arrays = {};
      for (const name of Object.keys(test.made)) arrays[name] = array(test.inputs[name], arrays);
      const found = Object.entries(arrays).map(([name, x]) => [name, [x.shape, digest(x.flat)]]);
      console.log(JSON.stringify([path, test.tcId, Object.fromEntries(found)]));
    }
  }
}
