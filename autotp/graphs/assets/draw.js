"use strict";
// Layout by dagre, drawn as SVG. Only what is unfolded is laid out.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = { attention: "#2f6fd0", mlp: "#2e8b57", vocabulary: "#b7791f", input: "#8e44ad", sequence: "#0b7a8a" };
const TINTS = { attention: "#e3edfc", mlp: "#e2f4e9", vocabulary: "#fbf0da", input: "#f3e6f8", sequence: "#e0f3f5" };

function make(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  for (const child of children) {
    element.append(typeof child === "string" ? document.createTextNode(child) : child);
  }
  return element;
}

function cut(text, length) {
  return text.length > length ? text.slice(0, length - 1) + "\u2026" : text;
}

/** Lines of text in a node, and its size. */
function content(node) {
  if (node.type === "border") {
    const line = cut(node.text, 44);
    return { lines: [line], width: 24 + 6.2 * line.length, height: 24 };
  }
  if (node.type === "fold") {
    const title = node.title || foldTitle(node);
    const lines = [title, node.sub || foldFacts(node)];
    const width = Math.max(150, 26 + 6.9 * Math.max(...lines.map((line) => line.length)));
    return { lines, width, height: node.run ? 52 : 46 };
  }
  const value = node.value;
  if (COLLECTIVES.has(value.role)) {
    const text = COLLECTIVES.get(value.role).does;
    return { lines: [text], width: 46 + 6.2 * text.length, height: 32 };
  }
  if (WEIGHTS.has(value.role)) {
    const name = value.operator.split(".").slice(-2).join(".");
    const lies = value.placement === "S" ? "[" + localShape(value, state.rank).join(", ") + "]" :
      "[" + value.shape.join(", ") + "] whole";
    return { lines: [name, lies], width: 22 + 6.2 * Math.max(name.length, lies.length), height: 34 };
  }
  const lines = [value.role === "input" ? shortName(value) : value.operator.replace("aten.", "")];
  if (value.part) lines.push(KINDS[value.pair] + ", " + value.part + "-parallel");
  return { lines, width: Math.max(70, 24 + 6.8 * Math.max(...lines.map((l) => l.length))), height: lines.length > 1 ? 40 : 28 };
}

function foldTitle(node) {
  const first = MODULES.get(node.paths[0]);
  const name = relative(first.path);
  if (!node.run) return name;
  const last = MODULES.get(node.paths[node.paths.length - 1]).name;
  return name + " \u2026 " + last + "  (" + node.paths.length + " alike)";
}

function relative(path) {
  return state.focus && path.startsWith(state.focus + ".") ? path.slice(state.focus.length + 1) : path;
}

function foldFacts(node) {
  const values = node.run ? valuesOf(node.paths[0]) : node.values;
  const facts = summary(values);
  const found = [];
  if (facts.g || facts.f) found.push(facts.f + " f, " + facts.g + " g");
  if (facts.split || facts.whole) found.push(facts.split + " split, " + facts.whole + " whole weights");
  return (node.run ? "each: " : "") + (found.join("; ") || values.length + " values");
}

function edgeLines(edge) {
  const value = edge.value;
  if (WEIGHTS.has(value.role) || !value.dtype) return [];
  const shape = "[" + localShape(value, state.rank).join(", ") + "]" + (edge.more ? " +" + edge.more : "");
  return value.placement === "S" ? [value.where, shape] : [value.placement + "  " + shape];
}

function layout(graph) {
  const g = new dagre.graphlib.Graph({ compound: true, multigraph: true });
  g.setGraph({ rankdir: "TB", nodesep: 20, ranksep: 34, edgesep: 10, marginx: 20, marginy: 20 });
  g.setDefaultEdgeLabel(() => ({}));
  for (const cluster of graph.clusters.values()) g.setNode(cluster.id, { cluster });
  for (const node of graph.nodes.values()) {
    node.content = content(node);
    g.setNode(node.id, { width: node.content.width, height: node.content.height, node });
  }
  for (const item of [...graph.clusters.values(), ...graph.nodes.values()]) {
    if (item.parent && graph.clusters.has(item.parent)) g.setParent(item.id, item.parent);
  }
  for (const id of [...graph.clusters.keys()]) { // dagre cannot lay out an empty cluster
    if (!g.children(id).length) { g.removeNode(id); graph.clusters.delete(id); }
  }
  const labelled = new Set();
  for (const edge of graph.edges) {
    const key = edge.value.index + " " + edge.value.where;
    edge.lines = labelled.has(key) ? [] : edgeLines(edge);
    labelled.add(key);
    const longest = Math.max(0, ...edge.lines.map((line) => line.length));
    g.setEdge(edge.from, edge.to, { edge, width: edge.lines.length ? 8 + 5.6 * longest : 0,
      height: 13 * edge.lines.length, labelpos: "c", weight: WEIGHTS.has(edge.value.role) ? 1 : 3 });
  }
  dagre.layout(g);
  return g;
}

const camera = { x: 0, y: 0, scale: 1 };
let drawn = null;

function draw(keep = false) {
  const canvas = document.getElementById("canvas");
  const graph = visibleGraph();
  const g = layout(graph);
  const size = g.graph();
  const root = make("g", { id: "root" });
  for (const id of sortedClusters(graph)) root.append(drawCluster(graph.clusters.get(id), g.node(id), graph));
  for (const e of g.edges()) root.append(drawEdge(g.edge(e)));
  for (const node of graph.nodes.values()) root.append(drawNode(node, g.node(node.id)));
  const svg = make("svg", { role: "img", "aria-label": "graph of " + (state.focus || DATA.model) }, arrows(), root);
  canvas.replaceChildren(svg);
  drawn = { root, width: size.width || 100, height: size.height || 100, g, graph };
  if (keep) moveCamera(); else fit(true);
  highlight();
}

function sortedClusters(graph) {
  const depth = (id) => (id && graph.clusters.has(id) ? 1 + depth(graph.clusters.get(id).parent) : 0);
  return [...graph.clusters.keys()].sort((a, b) => depth(a) - depth(b));
}

function arrows() {
  const marker = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    make("path", { d: "M0,0 L8,4 L0,8 z", fill: "#7b8794" }));
  return make("defs", {}, marker);
}

/** How many clusters lie in each other at a cluster's top: room for their titles. */
function levels(id, graph) {
  const inner = [...graph.clusters.values()].filter((one) => one.parent === id).map((one) => levels(one.id, graph));
  return 1 + Math.max(0, ...inner);
}

function drawCluster(cluster, at, graph) {
  const top = 16 * levels(cluster.id, graph), x = at.x - at.width / 2, y = at.y - at.height / 2 - top + 4;
  const group = make("g", { class: "cluster", "data-id": cluster.id });
  const module = MODULES.get(cluster.path);
  const text = relative(cluster.path) + (module.kind ? "  " + module.kind : "");
  group.append(make("rect", { x, y, width: at.width, height: at.height + top - 4, rx: 8 }));
  group.append(make("text", { x: x + at.width - 8, y: y + 13, class: "cluster-title" }, "\u2212 " + cut(text, Math.max(8, Math.floor(at.width / 6.4)))));
  group.append(make("title", {}, "fold " + cluster.path));
  group.addEventListener("click", (event) => { event.stopPropagation(); fold(cluster.id, false); });
  return group;
}

function edgeColour(value) {
  if (value.placement === "P") return "#c0392b";
  if (value.placement === "R") return "#d08700";
  if (value.placement === "S") return COLOURS[kindOf(value)] || "#555";
  return "#9aa5b1";
}

function darker(value) {
  return value.placement === "I" ? "#616e7c" : value.placement === "R" ? "#a86e00" : edgeColour(value);
}

function drawEdge(label) {
  const { edge, points } = label;
  const value = edge.value;
  const d = points.map((p, i) => (i ? "L" : "M") + p.x.toFixed(1) + "," + p.y.toFixed(1)).join("");
  const style = value.placement === "P" ? "2 3" : value.placement === "R" ? "6 3" : "";
  const group = make("g", { class: "edge" }, make("path", { d, stroke: edgeColour(value), "stroke-dasharray": style,
    "stroke-width": value.placement === "S" ? 2 : 1.3, "marker-end": "url(#arrow)" }));
  if (edge.lines.length) {
    const width = label.width, x = label.x, y = label.y;
    const height = 12.5 * edge.lines.length;
    group.append(make("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 3, class: "edge-back" }));
    edge.lines.forEach((line, i) => group.append(make("text", { x, y: y - height / 2 + 9.5 + 11.5 * i,
      class: i ? "edge-shape" : "edge-place", fill: i ? "#616e7c" : darker(value) }, line)));
  }
  const hidden = edge.hidden ? " (" + edge.hidden + " reshapes hidden)" : "";
  group.append(make("title", {}, shortName(value) + ": " + value.where + " [" + value.shape.join(", ") + "]" + hidden));
  group.addEventListener("click", (event) => { event.stopPropagation(); choose(value.index); });
  return group;
}

function drawNode(node, at) {
  const { lines, width, height } = node.content;
  const group = make("g", { class: "node " + node.type, transform: "translate(" + at.x + "," + at.y + ")", "data-id": node.id, tabindex: 0 });
  const value = node.value;
  if (node.type === "value") {
    group.classList.add(...(COLLECTIVES.has(value.role) ? ["collective", COLLECTIVES.get(value.role).backward ? "late" : "early"] : []));
    group.classList.add(value.role.replace(/ /g, "-"));
    group.setAttribute("data-name", shortName(value));
  }
  const box = { x: -width / 2, y: -height / 2, width, height };
  if (node.type === "value" && COLLECTIVES.has(value.role)) {
    const letter = COLLECTIVES.get(value.role).letter;
    group.append(make("rect", { ...box, rx: 16 }), make("circle", { cx: box.x + 16, r: 16 }),
      make("text", { x: box.x + 16, y: 5, class: letter.length > 1 ? "letter two" : "letter" }, letter), make("text", { x: 16, y: 4, class: "aside" }, lines[0]));
  } else if (node.type === "value") {
    const kind = kindOf(value);
    const rect = make("rect", { ...box, rx: WEIGHTS.has(value.role) || value.role === "input" ? 15 : 4 });
    if (value.part) { rect.style.fill = COLOURS[kind]; rect.style.stroke = COLOURS[kind]; group.classList.add("pair"); }
    else if (value.placement === "S") { rect.style.fill = TINTS[kind]; rect.style.stroke = COLOURS[kind]; }
    group.append(rect);
  } else {
    if (node.run) {
      group.append(make("rect", { ...box, x: box.x + 6, y: box.y - 6, rx: 6, class: "stack" }), make("rect", { ...box, x: box.x + 3, y: box.y - 3, rx: 6, class: "stack" }));
    }
    group.append(make("rect", { ...box, rx: node.type === "fold" ? 6 : 12 }));
    if (node.type === "fold") kindMarks(node, box).forEach((mark) => group.append(mark));
  }
  if (!(node.type === "value" && COLLECTIVES.has(value.role))) {
    lines.forEach((line, i) => group.append(make("text", { y: lines.length > 1 ? -3 + 13 * i : 4, class: i ? "second" : "first" }, line)));
  }
  group.append(make("title", {}, node.type === "fold" ? "unfold" : shortName(value)));
  const act = (event) => { event.stopPropagation(); node.type === "fold" ? unfold(node) : choose(value.index); };
  group.addEventListener("click", act);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter") act(event); });
  return group;
}

/** A coloured mark at a folded box for each kind of GEMM pair in it. */
function kindMarks(node, box) {
  return summary(node.values).kinds.map((kind, at) =>
    make("rect", { x: box.x + 8 + 16 * at, y: box.y - 3, width: 13, height: 6, rx: 2, class: "mark", style: "fill:" + COLOURS[kind] + ";stroke:none" }));
}

function moveCamera() {
  drawn.root.setAttribute("transform", "translate(" + camera.x + "," + camera.y + ") scale(" + camera.scale + ")");
}

/** Show the whole graph; `readable` keeps text large enough to read and shows the top instead. */
function fit(readable = false) {
  const canvas = document.getElementById("canvas");
  const scale = Math.min(canvas.clientWidth / drawn.width, canvas.clientHeight / drawn.height, 1.25);
  camera.scale = readable ? Math.max(scale, Math.min(0.8, canvas.clientWidth / drawn.width)) : scale;
  camera.scale = Math.max(camera.scale, 0.05);
  camera.x = (canvas.clientWidth - drawn.width * camera.scale) / 2;
  camera.y = Math.max(0, (canvas.clientHeight - drawn.height * camera.scale) / 2);
  if (drawn.height * camera.scale > canvas.clientHeight) camera.y = 0;
  moveCamera();
}

function zoom(factor, x, y) {
  const canvas = document.getElementById("canvas");
  const cx = x === undefined ? canvas.clientWidth / 2 : x, cy = y === undefined ? canvas.clientHeight / 2 : y;
  const scale = Math.min(4, Math.max(0.05, camera.scale * factor));
  camera.x = cx - ((cx - camera.x) * scale) / camera.scale;
  camera.y = cy - ((cy - camera.y) * scale) / camera.scale;
  camera.scale = scale;
  moveCamera();
}

/** Mark the chosen value, and bring it into sight. */
function highlight(reveal = false) {
  for (const element of document.querySelectorAll(".node.chosen")) element.classList.remove("chosen");
  if (state.chosen === null) return;
  const element = document.querySelector('.node[data-id="v:' + state.chosen + '"]');
  if (!element) return;
  element.classList.add("chosen");
  if (!reveal) return;
  const at = drawn.g.node("v:" + state.chosen), canvas = document.getElementById("canvas");
  const x = camera.x + at.x * camera.scale, y = camera.y + at.y * camera.scale;
  if (x < 40 || y < 40 || x > canvas.clientWidth - 40 || y > canvas.clientHeight - 60) {
    camera.x = canvas.clientWidth / 2 - at.x * camera.scale;
    camera.y = canvas.clientHeight / 2 - at.y * camera.scale;
    moveCamera();
  }
}
