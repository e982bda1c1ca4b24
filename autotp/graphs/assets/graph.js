"use strict";
// What is shown of a module: boxes of folded modules, values, and the edges between them.

const MOST = 70; // values and boxes that are unfolded without being asked for

/** State of the page: the module in focus, unfolded boxes, the chosen rank and value. */
const state = { focus: "", unfolded: new Map(), rank: 0, chosen: null, views: false };

/** Groups below a module: alike neighbours as one, a child module, or arithmetic of indices. */
function groupsOf(path) {
  const found = [];
  const done = new Set();
  for (const child of MODULES.get(path).children) {
    const run = MODULES.get(child).run;
    if (run) {
      if (!done.has(run)) found.push({ id: "run:" + run, paths: RUNS.get(run), run: true });
      done.add(run);
    } else {
      found.push({ id: "mod:" + child, paths: [child], run: false });
    }
  }
  return found;
}

function countShown(values) {
  return values.filter((value) => state.views || !isView(value)).length;
}

/** Which groups are unfolded: what was clicked, else as many as fit, small ones first. */
function openGroups(focus) {
  const open = new Set();
  let shown = countShown(MODULES.get(focus).own.filter((value) => !isIndex(value)));
  const queue = groupsOf(focus);
  queue.sort((a, b) => valuesOf(a.paths[0]).length - valuesOf(b.paths[0]).length);
  while (queue.length) {
    const group = queue.shift();
    const asked = state.unfolded.get(group.id);
    const own = group.run ? Infinity : countShown(MODULES.get(group.paths[0]).own) +
      groupsOf(group.paths[0]).length;
    const fits = shown + own <= MOST;
    if (asked === false || (asked !== true && !fits)) continue;
    open.add(group.id);
    if (fits) shown += own;
    queue.push(...(group.run ? group.paths.map((path) => ({ id: "mod:" + path, paths: [path], run: false })) :
      groupsOf(group.paths[0])));
    queue.sort((a, b) => valuesOf(a.paths[0]).length - valuesOf(b.paths[0]).length);
  }
  return open;
}

/** The graph to draw: `nodes` by id, `edges`, and `clusters` (unfolded modules) with parents. */
function visibleGraph() {
  const open = openGroups(state.focus);
  const nodes = new Map();
  const clusters = new Map();
  const home = new Map(); // value index -> id of the node that it is in
  place(state.focus, "", open, nodes, clusters, home);
  const edges = new Map();
  for (const [index, to] of home) {
    for (const at of VALUES[index].operands) connect(at, to, nodes, home, edges);
  }
  const outside = new Set();
  for (const [index, from] of home) {
    const value = VALUES[index];
    const read = value.users.some((at) => !isBelow(VALUES[at].module, state.focus));
    if (read || DATA.returned.includes(index)) outside.add(index);
  }
  for (const index of outside) {
    const id = "out:" + index;
    nodes.set(id, { id, type: "border", value: VALUES[index], parent: "", text: "to " + readers(index) });
    addEdge(edges, home.get(index), id, VALUES[index]);
  }
  return { nodes, clusters, edges: [...edges.values()] };
}

function readers(index) {
  const found = VALUES[index].users.map((at) => VALUES[at]).filter((v) => !isBelow(v.module, state.focus));
  return found.length ? found[0].module || "the model" : "the caller";
}

function place(path, parent, open, nodes, clusters, home) {
  const own = MODULES.get(path).own;
  const indices = own.filter((value) => isIndex(value) && !state.unfolded.get("int:" + path));
  const folded = indices.length > 2 ? new Set(indices) : new Set();
  if (folded.size) {
    const id = "int:" + path;
    nodes.set(id, { id, type: "fold", parent, title: "masks and positions", sub: folded.size + " whole numbers and flags", values: indices });
    for (const value of folded) home.set(value.index, id);
  }
  for (const value of own) {
    if (folded.has(value) || (!value.dtype && !value.users.length)) continue;
    if (!state.views && isView(value) && value.operands.some((at) => VALUES[at].dtype)) continue;
    const id = "v:" + value.index;
    nodes.set(id, { id, type: "value", value, parent });
    home.set(value.index, id);
  }
  for (const group of groupsOf(path)) {
    if (open.has(group.id)) {
      const id = group.id;
      if (!group.run) {
        const module = MODULES.get(group.paths[0]);
        const inner = groupsOf(module.path).length + countShown(module.own);
        const simple = inner < 2 || (module.own.length === 0 && groupsOf(module.path).length === 1);
        if (!simple) clusters.set(id, { id, path: group.paths[0], parent });
        place(group.paths[0], simple ? parent : id, open, nodes, clusters, home);
      } else {
        for (const one of group.paths) placeOne(one, parent, open, nodes, clusters, home);
      }
    } else {
      const values = group.paths.flatMap(valuesOf);
      nodes.set(group.id, { id: group.id, type: "fold", parent, values, paths: group.paths, run: group.run });
      for (const value of values) home.set(value.index, group.id);
    }
  }
}

function placeOne(path, parent, open, nodes, clusters, home) {
  const id = "mod:" + path;
  if (open.has(id)) {
    clusters.set(id, { id, path, parent });
    place(path, id, open, nodes, clusters, home);
  } else {
    nodes.set(id, { id, type: "fold", parent, values: valuesOf(path), paths: [path], run: false });
    for (const value of valuesOf(path)) home.set(value.index, id);
  }
}

/** An edge from a value, or from what it is a view of where views are not shown. */
function connect(at, to, nodes, home, edges) {
  let value = VALUES[at];
  const label = value;
  let hidden = 0;
  while (!home.has(value.index) && isBelow(value.module, state.focus) && isView(value)) {
    value = VALUES[value.operands.find((i) => VALUES[i].dtype)];
    hidden += 1;
  }
  if (!value.dtype && !home.has(value.index)) return; // a size
  if (!home.has(value.index)) {
    const id = "in:" + value.index;
    if (!nodes.has(id)) {
      nodes.set(id, { id, type: "border", value, parent: "", text: shortName(value) + " from " + (value.module || "outside") });
    }
    addEdge(edges, id, to, label, hidden);
  } else if (home.get(value.index) !== to) {
    addEdge(edges, home.get(value.index), to, label, hidden);
  }
}

function addEdge(edges, from, to, value, hidden = 0) {
  const key = from + " " + to;
  if (!edges.has(key)) edges.set(key, { from, to, value, hidden, more: 0 });
  else if (edges.get(key).value !== value) edges.get(key).more += 1;
}

/** What a folded box holds: collectives, and weights split and whole. */
function summary(values) {
  const count = (test) => values.filter(test).length;
  return {
    g: count((v) => v.role === "g"),
    f: count((v) => v.role === "f"),
    gather: count((v) => v.role === "gather"),
    split: count((v) => v.role === "parameter" && v.placement === "S"),
    whole: count((v) => v.role === "parameter" && v.placement !== "S"),
    kinds: [...new Set(values.map((v) => v.pair).filter((kind) => kind))],
  };
}
