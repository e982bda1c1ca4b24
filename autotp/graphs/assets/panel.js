"use strict";
// The right side: facts about the module in focus, or about the chosen value.

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") element.addEventListener("click", value);
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function link(value, text) {
  return el("button", { class: "link", onclick: () => choose(value.index, true) }, text || shortName(value));
}

const PLACES = {
  I: "I: the same on every rank, its gradient too",
  R: "R: the same on every rank, used differently by each; its gradient is a partial sum",
  sequence: "S: every rank holds its own slice of the sequence",
  S: "S: every rank holds its own part",
  P: "P: every rank holds a summand; the value is the sum over ranks",
};
const WORDS = {
  f: "f: passes the value on; in the backward pass it all-reduces the gradient.",
  g: "g: an all-reduce adds the ranks' summands; in the backward pass the gradient passes.",
  gather: "all-gather: ranks' parts are joined; backward each takes its own part.",
  scatter: "each rank takes its own part of a whole value; backward the parts are gathered.",
  "reduce-scatter": "reduce-scatter: the ranks' summands are added, and each rank gets a slice of the sequence; backward all-gathers.",
  "gather slices for a region": "all-gather: slices of the sequence are joined before split work; backward reduce-scatters.",
  "gather slices": "all-gather: slices of the sequence are joined for an operator that needs the whole; backward each rank takes its slice.",
  slice: "each rank takes its slice of the sequence; backward the slices are gathered.",
};

function showPanel() {
  const panel = document.getElementById("panel");
  panel.replaceChildren(...(state.chosen === null ? modulePanel() : valuePanel(VALUES[state.chosen])));
  panel.scrollTop = 0;
}

// ---- a value

function valuePanel(value) {
  const found = [
    el("button", { class: "back", onclick: () => choose(null) }, "\u2190 " + (state.focus || DATA.model)),
    el("h2", {}, shortName(value)),
    el("p", { class: "tags" }, ...tags(value)),
  ];
  if (WORDS[value.role]) found.push(el("p", { class: "lead" }, WORDS[value.role]));
  if (value.part) {
    found.push(el("p", { class: "lead" }, pairName(value.pair) + ", " + value.part + "-parallel: " +
      (value.part === "column" ? "makes " : value.pair === "vocabulary" ? "looks words up along " : "sums over ") + value.axis +
      (value.placement === "P" ? "; every rank has a summand, and " + (adders(value) || "a collective") + " adds them." : ".")));
  }
  if (value.explained) {
    found.push(el("h3", {}, value.placement === "S" ? "why it is split so" : "why it is whole"));
    found.push(el("p", { class: "explained" }, ...lines(value.explained)));
  }
  found.push(facts(value));
  if (value.dtype) found.push(el("h3", {}, "on each rank"), rankTable(value));
  if (!value.explained && value.whole.length) {
    found.push(el("h3", {}, "why its dims are whole"), bullets(value.whole));
  }
  if (value.bars.length) found.push(el("h3", {}, "what this operator bars"), bullets(value.bars));
  found.push(el("h3", {}, "made from"), links(value.operands), el("h3", {}, "read by"), links(value.users));
  return found;
}

function adders(value) {
  const seen = value.users.map((at) => VALUES[at]).flatMap((v) => (isView(v) ? v.users.map((at) => VALUES[at]) : [v]));
  return seen.filter((v) => COLLECTIVES.has(v.role)).map((v) => v.name).join(", ");
}

function lines(text) {
  return text.split("\n").flatMap((line, at) => (at ? [el("br"), line] : [line]));
}

function tags(value) {
  const kind = kindOf(value);
  const made = [el("span", { class: "tag" }, value.role === "product" ? "matrix product" : value.role)];
  if (kind) made.push(el("span", { class: "tag", style: "background:" + COLOURS[kind] + ";color:#fff" }, KINDS[kind]));
  if (value.placement) made.push(el("span", { class: "tag place-" + value.placement, title: PLACES[value.placement] }, value.where));
  return made;
}

function facts(value) {
  const rows = [
    ["call", callText(value)],
    ["module", (value.module || DATA.model) + (value.kind ? " (" + value.kind + ")" : "")],
    ["source", value.source],
    ["rule", value.rule],
    ["whole shape", value.dtype ? value.dtype + "[" + value.shape.join(", ") + "]" : ""],
    ["axes", value.placement === "S" && value.slice === null ? "[" + value.dims.map((tree, at) => (axisIn(tree) ? treeText(tree) : value.shape[at])).join(", ") + "]" : ""],
    ["placement", PLACES[value.slice === null ? value.placement : "sequence"] || ""],
  ];
  const table = el("table", { class: "facts" });
  for (const [name, text] of rows) if (text) table.append(el("tr", {}, el("th", {}, name), el("td", {}, text)));
  return table;
}

function treeText(tree) {
  if (!Array.isArray(tree)) return String(tree);
  const parts = tree.slice(1).map((part) => (tree[0] === "*" && Array.isArray(part) && part[0] === "+" ? "(" + treeText(part) + ")" : treeText(part)));
  return parts.join(tree[0] === "*" ? "*" : " + ");
}

function rankTable(value) {
  if (value.placement !== "S") {
    return el("p", {}, "[" + value.shape.join(", ") + "] on all " + DATA.tp + " ranks" + (value.placement === "P" ? ", to be added" : ""));
  }
  const table = el("table", { class: "ranks" });
  const axis = value.dims.map(axisIn).find((name) => name);
  if (value.slice !== null && !/^\d+$/.test(value.shape[value.slice])) {
    const size = value.shape[value.slice], at = (rank) => size + "*" + rank + "/" + DATA.tp;
    return el("p", {}, "[" + localShape(value, state.rank).join(", ") + "]: rank " + state.rank + " holds items " + at(state.rank) + " to " + at(state.rank + 1) + ", rounded down");
  }
  table.append(el("tr", {}, el("th", {}, "rank"), el("th", {}, "shape"), axis ? el("th", {}, unitName(axis) + " of " + axis) : null));
  for (const rank of RANKS) {
    const row = el("tr", { class: rank === state.rank ? "here" : "", onclick: () => setRank(rank) },
      el("td", {}, String(rank)), el("td", {}, "[" + localShape(value, rank).join(", ") + "]"));
    if (axis) row.append(el("td", {}, unitRange(axis, rank)));
    table.append(row);
  }
  return table;
}

function unitRange(axis, rank) {
  const bounds = DATA.axes[axis][2], count = bounds[rank + 1] - bounds[rank];
  if (!count) return "0";
  const last = bounds[rank + 1] - 1;
  return count + "  (" + (count === 1 ? "number " + last : bounds[rank] + " to " + last) + ")";
}

function bullets(texts) {
  return el("ul", {}, ...texts.map((text) => el("li", {}, text)));
}

function links(indices) {
  const found = indices.map((at) => VALUES[at]).filter((value) => value.dtype || COLLECTIVES.has(value.role));
  if (!found.length) return el("p", { class: "none" }, "nothing");
  return el("p", { class: "links" }, ...found.map((value) => link(value)));
}

// ---- a module

function modulePanel() {
  const module = MODULES.get(state.focus), values = valuesOf(state.focus);
  const found = [
    el("h2", {}, state.focus || DATA.model),
    el("p", { class: "tags" }, ...(module.kind ? [el("span", { class: "tag" }, module.kind)] : []),
      ...(module.run ? [el("span", { class: "tag" }, RUNS.get(module.run).length + " alike")] : [])),
  ];
  found.push(el("h3", {}, "what rank " + state.rank + " holds"), shareTable(values));
  found.push(...collectivesOf(values));
  found.push(...weightsOf(values));
  if (state.focus === "") {
    found.push(el("h3", {}, "the plan"), el("pre", {}, DATA.plan));
    found.push(el("h3", {}, "sizes that are not fixed"), bullets(Object.entries(DATA.symbols).map(([name, from]) => name + ": " + from)));
  }
  return found;
}

/** What the rank holds of each axis of the module, axes of alike layers in one row. */
function shareTable(values) {
  const table = el("table", { class: "ranks" });
  table.append(el("tr", {}, el("th", {}, "axis"), el("th", {}, "rank " + state.rank), el("th", {}, "on ranks")));
  const groups = new Map();
  for (const axis of new Set(values.map((value) => value.axis).filter((name) => name && DATA.axes[name]))) {
    const key = DATA.axes[axis][0] + DATA.axes[axis][2].join();
    groups.set(key, [...(groups.get(key) || []), axis]);
  }
  for (const names of groups.values()) {
    const axis = names[0], name = names.length > 1 ? axis + " \u2026 " + names[names.length - 1] : axis;
    const widths = RANKS.map((rank) => unitsOn(axis, rank));
    const same = widths.every((width) => width === widths[0]);
    const kind = DATA.axes[axis][0];
    table.append(el("tr", {},
      el("td", {}, el("span", { class: "dot", style: "background:" + COLOURS[kind] }), name),
      el("td", {}, el("b", {}, unitsOn(axis, state.rank) + " of " + DATA.axes[axis][1]), " " + unitName(axis)),
      el("td", {}, same ? widths[0] + " each" : runsOf(widths))));
  }
  if (!groups.size) return el("p", { class: "none" }, "nothing here is split");
  return table;
}

/** `0\u20133: 2, 4\u20137: 1` for 2 2 2 2 1 1 1 1. */
function runsOf(widths) {
  const found = [];
  widths.forEach((width, rank) => {
    const last = found[found.length - 1];
    if (last && last.width === width) last.to = rank;
    else found.push({ width, from: rank, to: rank });
  });
  return found.map(({ width, from, to }) => (from === to ? from : from + "\u2013" + to) + ": " + width).join(", ");
}

/** A list with one line for those that differ in numbers only: the first, and how many there are. */
function folded(values, describe) {
  const groups = new Map();
  for (const value of values) {
    const key = describe(value).replace(/\d+/g, "#");
    groups.set(key, [...(groups.get(key) || []), value]);
  }
  return el("ul", {}, ...[...groups.values()].map((items) => {
    if (items.length === 1) {
      const weight = WEIGHTS.has(items[0].role);
      return el("li", {}, link(items[0], weight ? describe(items[0]) : ""), weight ? "" : " " + describe(items[0]));
    }
    const last = describe(items[items.length - 1]).match(/\d+/g) || [];
    let at = 0;
    const text = describe(items[0]).replace(/\d+/g, (n) => (last[at++] === n ? n : n + "\u2026" + last[at - 1]));
    return el("li", {}, el("b", {}, items.length + " \u00d7 "), text, " ", link(items[0], "first"), " ", link(items[items.length - 1], "last"));
  }));
}

function collectivesOf(values) {
  const found = [];
  const of = (role) => values.filter((value) => value.role === role);
  const list = (title, items, note) => {
    if (!items.length) return;
    found.push(el("h3", { title: note }, title + ": " + items.length), items.length > 8 ? folded(items, where) :
      el("ul", {}, ...items.map((value) => el("li", {}, ...(ofWeight(value) ? [link(value, relative(ofWeight(value).operator)), ": its gradient"] :
        [link(value), " " + where(value)])))));
  };
  list("all-reduces forward (g)", of("g"), "after row-parallel products");
  list("reduce-scatters forward", of("reduce-scatter"), "a slice of the sum for each rank; all-gather in backward");
  list("all-gathers forward, of slices", of("gather slices for a region"), "before column-parallel products; reduce-scatter in backward");
  list("all-gathers forward, of slices, for whole work", of("gather slices"), "for operators that need the whole sequence");
  list("all-reduces backward (f)", of("f"), "before column-parallel products");
  list("slices taken", of("slice"), "all-gather in backward");
  list("all-gathers", of("gather"), "of results");
  list("own parts taken", of("scatter"), "of whole values");
  if (!found.length) found.push(el("h3", {}, "collectives: none"));
  return found;
}

/** The weight whose gradient an f adds up. */
function ofWeight(value) {
  const made = value.role === "f" && VALUES[value.operands[0]];
  return made && WEIGHTS.has(made.role) ? made : null;
}

function where(value) {
  if (value.role === "g" || value.role === "reduce-scatter") {
    let from = VALUES[value.operands[0]];
    while (isView(from)) from = VALUES[from.operands.find((at) => VALUES[at].dtype)];
    return "after " + (from.module || from.name) + (kindOf(from) ? " (" + KINDS[kindOf(from)] + ")" : "");
  }
  if (ofWeight(value)) return "of the gradient of " + ofWeight(value).operator;
  const readers = value.users.map((at) => VALUES[at]).flatMap((v) => (isView(v) ? v.users.map((at) => VALUES[at]) : [v]));
  const names = [...new Set(readers.filter((v) => v.dtype).map((v) => v.module || v.name))];
  return "before " + names.slice(0, 4).join(", ");
}

function weightsOf(values) {
  const weights = values.filter((value) => value.role === "parameter");
  const split = weights.filter((value) => value.placement === "S"), whole = weights.filter((value) => value.placement !== "S");
  const found = [];
  const reason = (value) => (value.explained.split("\n").find((line) => line.startsWith("Why: ")) || "").slice(5).replace(/\.$/, "");
  if (weights.length) found.push(el("h3", {}, "weights whole on every rank (replicated): " + whole.length));
  const by = new Map();
  for (const value of whole) by.set(reason(value), [...(by.get(reason(value)) || []), value]);
  for (const [why, items] of by) {
    found.push(el("p", { class: "why" }, /^(aten\.|it has )/.test(why) ? "their axis is whole because " : "because ", el("b", {}, why)));
    found.push(items.length > 8 ? folded(items, (value) => relative(value.operator)) :
      el("p", { class: "links" }, ...items.map((value) => link(value, relative(value.operator)))));
  }
  if (weights.length) found.push(el("h3", {}, "weights split: " + split.length));
  const held = (value) => relative(value.operator) + " [" + localShape(value, state.rank).join(", ") + "] of [" + value.shape.join(", ") + "]";
  found.push(split.length > 8 ? folded(split, held) : el("ul", {}, ...split.map((value) => el("li", {},
    link(value, relative(value.operator)), held(value).slice(relative(value.operator).length)))));
  return found;
}
