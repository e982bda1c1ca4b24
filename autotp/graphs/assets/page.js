"use strict";
// The module tree, the search, the rank, and what clicks do.

const treeOpen = new Set([""]); // the way to the layers is open from the start
for (const run of RUNS.keys()) {
  if (MODULES.get(run).path.split(".").filter((part) => /^\d+$/.test(part)).length > 1) continue;
  treeOpen.add("run:" + run);
  for (const path of parents(MODULES.get(run).parent)) treeOpen.add(path);
}

function focusOn(path, chosen = null) {
  state.focus = path;
  state.chosen = chosen;
  for (let at = path; at !== null; at = MODULES.get(at).parent) {
    treeOpen.add(at);
    if (MODULES.get(at).run) treeOpen.add("run:" + MODULES.get(at).run);
  }
  showTree();
  showBar();
  draw();
  showPanel();
  remember();
}

/** The address names what is seen, so that a link to a layer can be sent. */
function remember() {
  const parts = [["module", state.focus], ["value", state.chosen === null ? "" : VALUES[state.chosen].name], ["rank", state.rank]];
  const text = parts.filter((part) => part[1] !== "" && part[1] !== 0).map((part) => part[0] + "=" + encodeURIComponent(part[1]));
  history.replaceState(null, "", "#" + text.join("&"));
}

function recall() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const value = VALUES.find((one) => one.name === asked.get("value"));
  const rank = Number(asked.get("rank") || 0);
  focusOn(MODULES.has(asked.get("module")) ? asked.get("module") : "");
  setRank(Number.isInteger(rank) && rank >= 0 && rank < DATA.tp ? rank : 0);
  if (value) choose(value.index, true);
}

/** Show a value's facts; with `go` first the module that it is in, if it is not in sight. */
function choose(index, go = false) {
  state.chosen = index;
  if (index !== null && go) {
    const value = VALUES[index];
    if (isView(value) && !state.views) { state.views = true; document.getElementById("views").checked = true; draw(true); }
    if (!document.querySelector('.node[data-id="v:' + index + '"]')) return goTo(value);
  }
  highlight(go);
  showPanel();
  remember();
}

function goTo(value) {
  if (isIndex(value)) state.unfolded.set("int:" + value.module, true);
  let path = value.module;
  const layer = parents(path).find((at) => MODULES.get(at).run); // a whole layer says more
  if (layer !== undefined) path = layer;
  else if (MODULES.get(path).parent !== null && MODULES.get(path).children.length === 0) path = MODULES.get(path).parent;
  for (const at of parents(value.module)) if (at !== path && isBelow(at, path)) state.unfolded.set("mod:" + at, true);
  focusOn(path, value.index);
  highlight(true);
}

function parents(path) {
  const found = [];
  for (let at = path; at !== null; at = MODULES.get(at).parent) found.push(at);
  return found;
}

function unfold(node) {
  if (node.run) return focusOn(node.paths[0]);
  fold(node.id, true);
}

function fold(id, open) {
  state.unfolded.set(id, open);
  draw(true);
}

// ---- tree

function showTree() {
  const tree = document.getElementById("tree");
  const top = tree.scrollTop;
  tree.replaceChildren(el("ul", {}, branch("")));
  tree.scrollTop = top;
  const here = tree.querySelector(".here");
  if (here) here.scrollIntoView({ block: "nearest" });
}

function branch(path) {
  const module = MODULES.get(path);
  const row = rowOf(path, path === "" ? DATA.model : module.name, module.kind, module.children.length > 0, path, () => focusOn(path));
  const item = el("li", {}, row);
  if (treeOpen.has(path) && module.children.length) item.append(el("ul", {}, ...groupsOf(path).map(groupRow)));
  return item;
}

function groupRow(group) {
  if (!group.run) return branch(group.paths[0]);
  const first = MODULES.get(group.paths[0]), last = MODULES.get(group.paths[group.paths.length - 1]);
  const name = first.name + " \u2026 " + last.name;
  const row = rowOf(group.id, name, first.kind + " \u00d7" + group.paths.length, true, group.paths[0], () => toggle(group.id));
  const item = el("li", {}, row);
  if (treeOpen.has(group.id)) item.append(el("ul", {}, ...group.paths.map(branch)));
  return item;
}

function rowOf(id, name, kind, has, path, act) {
  const arrow = el("button", { class: "arrow", "aria-label": "open", onclick: () => toggle(id) }, has ? (treeOpen.has(id) ? "\u25be" : "\u25b8") : "");
  const marks = summary(valuesOf(path)).kinds.map((one) => el("span", { class: "dot", style: "background:" + COLOURS[one], title: KINDS[one] }));
  return el("div", { class: "row" + (id === state.focus ? " here" : "") }, arrow,
    el("button", { class: "name", "data-path": id, onclick: act }, name, el("small", {}, " " + kind)), ...marks);
}

function toggle(id) {
  if (treeOpen.has(id)) treeOpen.delete(id);
  else treeOpen.add(id);
  showTree();
}

// ---- bar

function showBar() {
  const path = document.getElementById("path");
  const crumbs = parents(state.focus).reverse();
  path.replaceChildren(...crumbs.flatMap((at, i) => [i ? " \u203a " : "",
    el("button", { class: "link", onclick: () => focusOn(at) }, at === "" ? DATA.model : MODULES.get(at).name)]));
  const step = document.getElementById("step");
  const layer = parents(state.focus).find((at) => MODULES.get(at).run);
  if (layer === undefined) return step.replaceChildren();
  const run = RUNS.get(MODULES.get(layer).run), at = run.indexOf(layer);
  const go = (to) => focusOn(run[to] + state.focus.slice(layer.length));
  const back = el("button", { title: "previous", onclick: () => at > 0 && go(at - 1) }, "\u2039");
  const next = el("button", { title: "next", onclick: () => at < run.length - 1 && go(at + 1) }, "\u203a");
  step.replaceChildren(back, " " + (at + 1) + " of " + run.length + " alike ", next);
}

// ---- search

function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter((word) => word);
  if (!words.length) return [];
  const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
  const also = (m) => (m.run ? " layer " + m.name + " block " + m.name : "");
  const found = [...MODULES.values()].filter((m) => m.path && fits(m.path + " " + m.kind + also(m)))
    .map((m) => ({ text: m.path, note: m.kind, act: () => focusOn(m.path) }));
  for (const value of VALUES) {
    const note = value.role + (value.placement ? ", " + value.where : "");
    if (value.role !== "size" && fits(shortName(value) + " " + value.operator + " " + value.module + " " + note)) {
      found.push({ text: shortName(value), note, act: () => choose(value.index, true) });
    }
  }
  const better = (item) => (item.text.toLowerCase().split(".").pop() === words[words.length - 1] ? 0 : 1);
  return found.sort((a, b) => better(a) - better(b)).slice(0, 60);
}

function showFound() {
  const list = document.getElementById("found"), input = document.getElementById("search");
  const items = search(input.value);
  list.hidden = !input.value.trim();
  list.replaceChildren(...(items.length ? items.map((item) => el("li", { onclick: () => { list.hidden = true; item.act(); } },
    item.text, el("small", {}, " " + item.note))) : [el("li", { class: "none" }, "nothing found")]));
}

// ---- start

/** ` \u00b7 2 of 12 heads` where all layers give the rank as many. */
function headsOn(rank) {
  const axes = Object.keys(DATA.axes).filter((name) => DATA.axes[name][0] === "attention");
  const found = new Set(axes.map((name) => (headsOf(name, rank) || []).join(" of ")));
  const heads = [...found].join();
  return found.size === 1 && heads ? "  \u00b7  " + heads + " heads" : "";
}

function setRank(rank) {
  state.rank = rank;
  document.getElementById("rank").value = rank;
  document.getElementById("rank-text").textContent = rank + " (of 0 to " + (DATA.tp - 1) + ")  \u00b7  " + DATA.parameters[rank].toLocaleString("en") + " parameters" + headsOn(rank);
  draw(true);
  showPanel();
  remember();
}

function legend() {
  const kinds = [...new Set(Object.values(DATA.axes).map((axis) => axis[0]))];
  const item = (mark, text) => el("span", {}, mark, text);
  const line = (style) => el("i", { class: "line", style });
  return [
    ...kinds.map((kind) => item(el("span", { class: "dot", style: "background:" + COLOURS[kind] }), pairName(kind))),
    ...(VALUES.some((value) => value.slice !== null) ? sequenceLegend(item) : []),
    item(el("b", { class: "letter-g" }, "g"), "all-reduce"), item(el("b", { class: "letter-f" }, "f"), "all-reduce in backward"),
    item(line("border-top:2px solid #2f6fd0"), "S split"), item(line("border-top:2px dashed #d08700"), "R behind f"),
    item(line("border-top:2px dotted #c0392b"), "P summand"), item(line("border-top:2px solid #9aa5b1"), "I same everywhere"),
  ];
}

function sequenceLegend(item) {
  return [item(el("span", { class: "dot", style: "background:" + COLOURS.sequence }), "slices of the sequence"),
    item(el("b", { class: "letter-g wide" }, "RS"), "reduce-scatter"), item(el("b", { class: "letter-g wide" }, "AG"), "all-gather of slices")];
}

function start() {
  document.getElementById("model").textContent = DATA.model + "  tp=" + DATA.tp;
  document.getElementById("rank").max = DATA.tp - 1;
  document.getElementById("legend").append(...legend());
  document.getElementById("rank").addEventListener("input", (event) => setRank(Number(event.target.value)));
  const input = document.getElementById("search");
  input.addEventListener("input", showFound);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { const items = search(input.value); if (items.length) { document.getElementById("found").hidden = true; items[0].act(); } }
    if (event.key === "Escape") { input.value = ""; showFound(); input.blur(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); }
    if (event.key === "Escape" && state.chosen !== null) choose(null);
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) document.getElementById("found").hidden = true; });
  document.getElementById("views").addEventListener("change", (event) => { state.views = event.target.checked; draw(); });
  document.getElementById("fit").addEventListener("click", () => fit());
  document.getElementById("in").addEventListener("click", () => zoom(1.25));
  document.getElementById("out").addEventListener("click", () => zoom(0.8));
  hand(document.getElementById("canvas"));
  window.addEventListener("resize", () => { fit(true); highlight(true); });
  recall();
}

/** Drag to move, wheel to scroll, with ctrl to zoom. */
function hand(canvas) {
  let from = null;
  canvas.addEventListener("pointerdown", (event) => { from = { x: event.clientX - camera.x, y: event.clientY - camera.y }; });
  window.addEventListener("pointermove", (event) => {
    if (!from || !event.buttons) return;
    camera.x = event.clientX - from.x;
    camera.y = event.clientY - from.y;
    moveCamera();
  });
  window.addEventListener("pointerup", () => { from = null; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    else { camera.x -= event.deltaX; camera.y -= event.deltaY; moveCamera(); }
  }, { passive: false });
}

start();
