// An engine of spec/protocol.md in JavaScript: `kvspec verify --command "node docs/examples/javascript/engine.mjs"`.
// It offers the family crystal, S1 to S6, and three published methods, in float64.

import { createInterface } from "node:readline";
import * as stages from "../../../kvspec/cli/explain/stages.mjs";
import * as essay from "./essay.mjs";
import { METHODS, selection } from "./methods.mjs";
import * as s1 from "./observe.mjs";

// Values of the protocol

class Refusal extends Error {
  constructor(argument, value, bound) {
    super(bound);
    Object.assign(this, { argument, value, bound });
  }
}

const NAMED = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const ARRAYS = { float64: Float64Array, float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };

/** A record with another value for each member. */
const mapped = (record, make) => Object.fromEntries(Object.entries(record).map(([name, x]) => [name, make(x)]));

/** An integer as a number where that is exact. */
const whole = (x) => (Number.isSafeInteger(Number(x)) ? Number(x) : BigInt(x));

/** A float or an integer from its text; any other text is itself. */
function scalar(text) {
  if (text in NAMED) return NAMED[text];
  if (/^-?\d+$/.test(text)) return whole(text);
  const found = /^(-?)0x([0-9a-f]+)\.?([0-9a-f]*)p([+-]?\d+)$/.exec(text);
  if (found === null) return text;
  const [, sign, units, rest, power] = found;
  // Two factors: one alone may be too small for a float.
  const half = Math.trunc((Number(power) - 4 * rest.length) / 2);
  const size = Number(BigInt(`0x${units}${rest}`)) * 2 ** half * 2 ** (Number(power) - 4 * rest.length - half);
  return sign ? -size : size;
}

function nested(flat, [size, ...inner]) {
  if (inner.length === 0) return flat;
  const step = size && flat.length / size;
  if (step === 0) return Array(size).fill([]);
  return Array.from({ length: size }, (_, at) => nested(flat.slice(at * step, (at + 1) * step), inner));
}

/** Shape, kind and entries of an array in either form, before anything is known of it. */
function arrayOf(raw) {
  if (!Array.isArray(raw)) {
    const bytes = Uint8Array.from(Buffer.from(raw.base64, "base64"));
    const flat = new ARRAYS[raw.dtype](bytes.buffer);
    return { shape: raw.shape, kind: raw.dtype, flat: raw.dtype === "int64" ? Array.from(flat, whole) : flat };
  }
  const shape = [];
  for (let part = raw; Array.isArray(part); [part] = part) shape.push(part.length);
  const leaves = raw.flat(Infinity);
  const kind = typeof leaves[0] === "number" ? "int64" : typeof leaves[0] === "boolean" ? "bool" : "float64";
  return { shape, kind, flat: leaves.map((x) => (typeof x === "string" ? scalar(x) : x)) };
}

/** Any argument: numbers, arrays as nested lists, records and parameters as objects. */
function decoded(raw) {
  if (raw === null || typeof raw === "number" || typeof raw === "boolean") return raw;
  if (typeof raw === "string") return scalar(raw);
  if (Array.isArray(raw)) return raw.map(decoded);
  if ("base64" in raw) {
    const { flat, shape } = arrayOf(raw);
    return nested(flat, shape);
  }
  return mapped(raw, decoded);
}

/** A result: JSON's numbers hold floats exactly. */
function encoded(x) {
  if (typeof x === "bigint") return String(x);
  if (typeof x === "number") return Number.isFinite(x) ? x : Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
  if (Array.isArray(x)) return x.map(encoded);
  if (ArrayBuffer.isView(x)) return Array.from(x, encoded);
  return typeof x === "object" ? mapped(x, encoded) : x;
}

// What coattention must refuse itself

function checkFloats(name, { shape, kind, flat }, axes) {
  if (shape.length !== axes) throw new Refusal(name, shape, `must have ${axes} axes`);
  if (!kind.startsWith("float")) throw new Refusal(name, kind, "must be floating point");
  if (shape.includes(0)) throw new Refusal(name, shape, "no axis may be empty");
  const odd = flat.find((x) => !Number.isFinite(x));
  if (odd !== undefined) throw new Refusal(name, encoded(odd), "must be finite");
}

function checkAttention(q, k, lse, sinks) {
  checkFloats("q", q, 3);
  checkFloats("k", k, 3);
  const [[H, n, d], [H_kv, live]] = [q.shape, k.shape];
  if (d !== k.shape[2]) throw new Refusal("k", k.shape, `the head dimension must be q's, ${d}`);
  if (H % H_kv) throw new Refusal("q", q.shape, `the heads must be a multiple of k's ${H_kv}`);
  if (n > live) throw new Refusal("q", q.shape, `there are only ${live} keys for ${n} queries`);
  for (const [name, x, wanted] of [["lse", lse, [H, n]], ["sinks", sinks, [H]]]) {
    if (x === null) continue;
    if (String(x.shape) !== String(wanted)) throw new Refusal(name, x.shape, `must have the shape ${wanted}`);
    checkFloats(name, x, wanted.length);
  }
}

// The family crystal: each stage by the forms that its parameters choose

const RARITY = {
  logarithm: stages.rarity, reciprocal: essay.reciprocalRarity, exponential: essay.exponentialRarity,
};
const IMPACT = {
  mixture: stages.impact, salience: stages.impactWithoutRarity, uniform: stages.uniformImpact, unit: essay.unitImpact,
};
const ALLOCATION = { cut: stages.allocate, tiers: essay.tierAllocate };

function coattention(given) {
  const [q, k, lse, sinks] = [given.q, given.k, given.lse, given.sinks].map((x) => x && arrayOf(x));
  checkAttention(q, k, lse, sinks);
  const [queries, keys] = [q, k].map(({ flat, shape }) => nested(Float64Array.from(flat), shape));
  const { positions, parameters, scaling, softcap } = decoded({ ...given, q: null, k: null, lse: null, sinks: null });
  return s1.coattention(queries, keys, positions, parameters, scaling, softcap, sinks?.flat);
}

function impact({ salience, token_ids, parameters }) {
  return IMPACT[parameters.impact](salience, RARITY[parameters.rarity](stages.tokenCounts(token_ids)), parameters);
}

// S2 to S6 count from the segment's first token: a position may lie beyond 2^53, where numbers are no longer exact.
const below = (x, start) => {
  return typeof x === "bigint" || typeof start === "bigint" ? Number(BigInt(x) - BigInt(start)) : x - start;
};
const above = (x, start) => whole(BigInt(x) + BigInt(start));

/** Edges in the segment, from its first token; a source before it is in no trunk of it. */
function edgesFromStart({ start, intra, intra_weight, cross, cross_weight }) {
  const from = (rows) => rows.map((row) => row.map((j) => (j < 0 ? -1 : below(j, start))));
  return s1.edgesOf({ start: 0, intra: from(intra), intra_weight, cross: from(cross), cross_weight });
}

function trunks({ coattention: found, impact: M, ends, parameters: p }) {
  const threshold = p.merge === "median"
    ? (sentences, byPair) => essay.medianStrength(sentences, byPair, p.tau_merge) : () => p.tau_merge;
  const offsets = s1.trunkOffsets(ends, edgesFromStart(found), p, threshold);
  const M_bar = stages.trunkImpact(M, offsets);
  return {
    offsets: offsets.map((offset) => above(offset, found.start)),
    impact: p.trunk_impact === "unit" ? essay.unitTrunkImpact(M_bar, p.epsilon) : M_bar,
  };
}

function graph({ coattention: found, trunks: { offsets }, parameters }) {
  const own = offsets.map((offset) => below(offset, found.start));
  return stages.trunkGraph(s1.trunkPairs(edgesFromStart(found), own), stages.sizesOf(own), parameters);
}

function score({ D, impact: M_bar, protected: isProtected, parameters: { alpha, epsilon } }) {
  return stages.score(D, stages.normalisedImpact(M_bar, isProtected, epsilon), alpha);
}

function dissolve({ score: scores, trunks: { offsets }, impact: M, D, protected: isProtected, budget, parameters: p }) {
  const [B, own] = [Number(budget), offsets.map((offset) => below(offset, offsets[0]))];
  const reserve = essay.coverageReserve(stages.sizesOf(own), isProtected, B, p.coverage);
  const dissolved = stages.dissolve(scores, own, M, D, isProtected, B - reserve, p.N_min, ALLOCATION[p.allocation]);
  const found = reserve ? essay.backfill(dissolved, own, D, reserve) : dissolved;
  return { ...found, kept: found.kept.map((i) => above(i, offsets[0])) };
}

const CRYSTAL = { coattention, impact, trunks, graph, score, dissolve };

// The protocol

const HELLO = {
  protocol: 1, spec: "0.4.1", name: "javascript", version: "1.1", precision: "float64",
  families: { crystal: Object.keys(CRYSTAL), methods: METHODS },
};

function result({ op, arguments: given }) {
  if (op === "hello") return HELLO;
  const [family, stage] = op.split(".");
  if (family === "methods") return encoded(selection(stage, decoded(given)));
  // What S1 refuses is in the form in which it came.
  return encoded(stage === "coattention" ? coattention(given) : CRYSTAL[stage](decoded(given)));
}

function answer(request) {
  try {
    return { id: request.id, result: result(request) };
  } catch (error) {
    if (!(error instanceof Refusal)) return { id: request.id, error: String(error.stack) };
    const { argument, value, bound } = error;
    return { id: request.id, refusal: { argument, value, bound } };
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(answer(JSON.parse(line)))}\n`);
}
