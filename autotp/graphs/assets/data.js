"use strict";
// The page's data: values with their facts, modules as a tree, and local sizes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RANKS = Array.from({ length: DATA.tp }, (_, rank) => rank);

const VALUES = DATA.values.map((row, index) => {
  const value = { index, users: [] };
  DATA.fields.forEach((field, at) => {
    if (field[0] === "#") value[field.slice(1)] = DATA.texts[row[at]];
    else value[field] = row[at];
  });
  return value;
});
for (const value of VALUES) for (const at of value.operands) VALUES[at].users.push(value.index);

const MODULES = new Map();
for (const [path, kind, run] of DATA.modules) {
  const cut = path.lastIndexOf(".");
  const parent = path === "" ? null : path.slice(0, Math.max(cut, 0));
  MODULES.set(path, { path, kind, run, parent, name: path.slice(cut + 1), children: [], own: [] });
  if (parent !== null) MODULES.get(parent).children.push(path);
}
for (const value of VALUES) {
  if (value.role !== "size") (MODULES.get(value.module) || MODULES.get("")).own.push(value);
}

const RUNS = new Map(); // first path -> all paths of the run
for (const module of MODULES.values()) {
  if (module.run) RUNS.set(module.run, [...(RUNS.get(module.run) || []), module.path]);
}

function isBelow(path, module) {
  return module === "" || path === module || path.startsWith(module + ".");
}

const below = new Map();
/** All values in a module and below it. */
function valuesOf(path) {
  if (!below.has(path)) {
    const module = MODULES.get(path);
    const inside = module.children.flatMap(valuesOf);
    below.set(path, [...module.own, ...inside].sort((a, b) => a.index - b.index));
  }
  return below.get(path);
}

const WEIGHTS = new Set(["parameter", "buffer", "constant"]);

// What is drawn of a collective: a letter, and what it does. `backward`: the forward pass sends nothing.
const COLLECTIVES = new Map([
  ["f", { letter: "f", does: "all-reduce in backward", backward: true }],
  ["g", { letter: "g", does: "all-reduce" }],
  ["gather", { letter: "G", does: "all-gather" }],
  ["scatter", { letter: "S", does: "own part", backward: true }],
  ["reduce-scatter", { letter: "RS", does: "reduce-scatter" }],
  ["gather slices for a region", { letter: "AG", does: "all-gather" }],
  ["gather slices", { letter: "AG", does: "all-gather" }],
  ["slice", { letter: "S", does: "own slice", backward: true }],
]);

function isIndex(value) {
  return value.role === "operator" && /^(u?int|bool)/.test(value.dtype) && value.placement === "I";
}

// Operators that only change how positions are counted.
function isView(value) {
  return value.role === "operator" && value.operands.filter((at) => VALUES[at].dtype).length === 1 &&
    (value.rule.startsWith("view.") || value.operator === "getitem" ||
      /^aten\.(contiguous|alias|detach)$/.test(value.operator)) && !/\.(cat|stack|pad)/.test(value.rule);
}

/** The size of a dim on a rank, as text. */
function sizeOn(tree, rank) {
  if (typeof tree === "number") return [tree, []];
  if (typeof tree === "string") {
    const axis = DATA.axes[tree];
    return axis ? [axis[2][rank + 1] - axis[2][rank], []] : [1, [tree]];
  }
  const parts = tree.slice(1).map((part) => sizeOn(part, rank));
  if (tree[0] === "*") {
    return [parts.reduce((n, part) => n * part[0], 1), parts.flatMap((part) => part[1])];
  }
  return [parts.reduce((n, part) => n + part[0], 0), parts[0] ? parts[0][1] : []];
}

function axisIn(tree) {
  if (typeof tree === "string") return DATA.axes[tree] ? tree : "";
  return Array.isArray(tree) ? tree.slice(1).map(axisIn).find((name) => name) || "" : "";
}

/** The shape of a value on a rank: whole dims as they are, split ones at their local size. */
function localShape(value, rank) {
  if (value.slice !== null) return value.shape.map((size, at) => (at === value.slice ? shareOf(size, rank) : size));
  if (value.placement !== "S" || !value.dims.length) return value.shape;
  return value.shape.map((whole, at) => {
    if (!axisIn(value.dims[at])) return whole;
    const symbols = whole.split("*").filter((part) => !/^\d+$/.test(part));
    const [count] = sizeOn(value.dims[at], rank);
    return [...symbols, ...(count !== 1 || !symbols.length ? [String(count)] : [])].join("*");
  });
}

/** A rank's slice of a sequence; of a length that is not fixed about `seq/8`. */
function shareOf(size, rank) {
  const edge = (at) => Math.floor((Number(size) * at) / DATA.tp);
  return /^\d+$/.test(size) ? String(edge(rank + 1) - edge(rank)) : size + "/" + DATA.tp;
}

function unitsOn(axis, rank) {
  return DATA.axes[axis][2][rank + 1] - DATA.axes[axis][2][rank];
}

function callText(value) {
  const name = (piece) => (Array.isArray(piece) ? piece[0] : typeof piece === "number" ?
    shortName(VALUES[piece]) : piece);
  const pieces = value.arguments.map(name);
  if (value.role === "input") return "an input of the model";
  if (WEIGHTS.has(value.role)) return value.operator;
  if (value.operator === "getitem") return pieces[0] + "[" + pieces[1].replace(", ", "") + "]";
  return value.operator + "(" + pieces.join("") + ")";
}

function shortName(value) {
  if (value.role === "input") return value.name.replace(/^kwargs_/, "");
  return WEIGHTS.has(value.role) ? value.operator : value.name;
}

const KINDS = { attention: "attention", mlp: "MLP", vocabulary: "vocabulary", input: "inputs in parts", sequence: "sequence" };

/** `MLP pair`; inputs in parts have no partner. */
function pairName(kind) {
  return KINDS[kind] + (kind === "input" ? "" : " pair");
}

/** The kind of the axis that splits or makes a value; empty for whole ones. */
function kindOf(value) {
  if (value.slice !== null) return "sequence";
  return value.pair || (value.axis && DATA.axes[value.axis] ? DATA.axes[value.axis][0] : "");
}

/** How heads depend on an attention axis: the dim of heads at its softmax. With key heads that are
 * shared, a unit of the axis is a group of heads. */
const HEADS = new Map();
for (const value of VALUES) {
  const softmax = /scaled_dot_product_attention|softmax/.test(value.operator) && value.shape.length === 4;
  if (softmax && !HEADS.has(value.axis) && axisIn(value.dims[1] || 0) === value.axis) HEADS.set(value.axis, value.dims[1]);
}

/** The heads that a rank has of an attention axis, and all of them; null where no softmax tells. */
function headsOf(axis, rank) {
  if (!HEADS.has(axis)) return null;
  const counts = RANKS.map((one) => sizeOn(HEADS.get(axis), one)[0]);
  return [counts[rank], counts.reduce((sum, count) => sum + count, 0)];
}

/** A unit of an attention axis in words. */
function headUnit(axis) {
  const heads = headsOf(axis, 0);
  if (!heads) return "units";
  const each = heads[1] / DATA.axes[axis][1];
  return each === 1 ? "heads" : "groups of " + each + " heads";
}

function unitName(axis) {
  const kind = DATA.axes[axis][0];
  return { attention: headUnit(axis), mlp: "features", vocabulary: "words", input: "input features" }[kind] || "units";
}
