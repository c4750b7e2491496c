// The behaviour of the pages. Every page is whole without it; nothing here makes HTML of text.
"use strict";
const $ = (query, from = document) => from.querySelector(query);
const $$ = (query, from = document) => [...from.querySelectorAll(query)];
const store = {
  get: (key) => { try { return localStorage.getItem(key); } catch { return null; } },
  set: (key, value) => { try { localStorage.setItem(key, value); } catch { /* a private window */ } },
};

// Theme: the system's, until the user chooses.
const applyTheme = (name) => { if (name) document.documentElement.dataset.theme = name; };
const isDark = () => (document.documentElement.dataset.theme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const toggleTheme = () => { const name = isDark() ? "light" : "dark"; applyTheme(name); store.set("theme", name); };
applyTheme(store.get("theme"));

// Rows: j and k walk, Enter opens.
let place = -1;
const rows = () => $$("[data-row]").filter((row) => !row.hidden);
function walk(by) {
  const all = rows();
  if (!all.length) return;
  place = Math.max(0, Math.min(all.length - 1, place + by));
  $$(".here").forEach((row) => row.classList.remove("here"));
  all[place].classList.add("here");
  all[place].scrollIntoView({ block: "nearest" });
  (all[place].matches("article") ? all[place] : $("a", all[place]))?.focus({ preventScroll: true });
}

// Filter of rows by words and verdicts.
function filter() {
  const words = ($("#filter")?.value || "").toLowerCase().split(/\s+/).filter(Boolean);
  const off = new Set($$("[data-verdict]").filter((box) => !box.checked).map((box) => box.dataset.verdict));
  for (const row of $$("tr[data-row]")) {
    const text = row.textContent.toLowerCase();
    const cells = $$("[data-of]", row);
    cells.forEach((cell) => cell.classList.toggle("off", off.has(cell.dataset.of)));
    const isEmpty = cells.length > 0 && cells.every((cell) => cell.classList.contains("off"));
    row.hidden = isEmpty || !words.every((word) => text.includes(word));
  }
  place = -1;
}

// Sort: a click on a column head.
function sort(head, isAgain = false) {
  const table = head.closest("table"), body = $("tbody", table);
  const column = [...head.parentNode.children].indexOf(head);
  const wasUp = head.getAttribute("aria-sort") === "ascending";
  const up = isAgain ? wasUp : !wasUp;
  $$("th[aria-sort]", table).forEach((each) => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = (row) => { const cell = row.children[column]; return cell ? cell.dataset.value ?? cell.textContent.trim() : ""; };
  const sorted = [...body.children].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    const order = x !== "" && y !== "" && !isNaN(x) && !isNaN(y) ? x - y : String(x).localeCompare(y, undefined, { numeric: true });
    return up ? order : -order;
  });
  body.append(...sorted);
}

// Charts: the values under the pointer.
function readChart(figure, share) {
  const steps = figure.dataset.steps.split(",");
  const [low, high] = [Number(steps[0]), Number(steps[steps.length - 1])];
  const at = low + share * (high - low);
  let n = 0;
  steps.forEach((step, i) => { if (Math.abs(step - at) < Math.abs(steps[n] - at)) n = i; });
  const cross = $(".cross", figure);
  cross.removeAttribute("hidden");
  cross.setAttribute("d", `M${high > low ? ((steps[n] - low) / (high - low)) * 600 : 0} 0V160`);
  const values = $$(".line", figure).map((line) => {
    const value = line.dataset.values.split(",")[n];
    return value ? `${line.dataset.name} ${value}` : "";
  });
  $("output", figure).textContent = `step ${steps[n]}: ${values.filter(Boolean).join(" · ")}`;
  return n / Math.max(steps.length - 1, 1);
}
const shareOf = (figure, event) => {
  const box = $("svg", figure).getBoundingClientRect();
  return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
};
document.addEventListener("pointermove", (event) => {
  const figure = event.target.closest?.(".panel[data-steps]");
  if (figure) readChart(figure, shareOf(figure, event));
  const token = event.target.closest?.(".strip .tok");
  if (token) showToken(token);
});
// Tokens: the facts of one.
function showToken(token) {
  $$(".tok.at").forEach((each) => each.classList.remove("at"));
  token.classList.add("at");
  const detail = $("#token");
  if (detail) detail.textContent = `${JSON.stringify(token.textContent)} · ${token.title}`;
}
function walkToken(by) {
  const all = $$(".strip .tok"), now = all.findIndex((each) => each.classList.contains("at"));
  const token = all[Math.max(0, Math.min(all.length - 1, now + by))];
  if (token) { showToken(token); token.scrollIntoView({ block: "nearest" }); }
}

function nextFar() {
  const all = $$(".strip .tok"), now = all.findIndex((each) => each.classList.contains("at"));
  const far = all.findIndex((each, n) => n > now && each.classList.contains("far"));
  const token = far < 0 ? $(".strip .tok.far") : all[far];
  if (token) { showToken(token); token.scrollIntoView({ block: "center" }); }
  else if ($("#token")) $("#token").textContent = "No framed token is on this page.";
}

// Two chosen attempts, on one page or on two, are compared.
const EPISODES = ".cell a, a[data-episode]";
function choose(link) {
  if (!link || !$("[data-compare]")) return;
  const other = sessionStorage.getItem("picked");
  const next = other && other !== link.href ? null : other ? "" : link.href;
  if (next) sessionStorage.setItem("picked", next); else sessionStorage.removeItem("picked");
  markPicked();
  const [run, , stage, name] = link.href.split("/").slice(-5);
  if (next === null) location.href = `${other.slice(0, other.lastIndexOf("/"))}/vs/${run}/${stage}/${name}.html`;
}
function markPicked() {
  const picked = sessionStorage.getItem("picked");
  $$(EPISODES).forEach((link) => link.classList.toggle("picked", link.href === picked));
}

function follow(query) { const link = $(query); if (link) location.href = link.href; }
function toggleFolds() {
  const folds = $$("main details"), open = folds.some((each) => !each.open);
  folds.forEach((each) => { each.open = open; });
}

document.addEventListener("input", (event) => {
  if (event.target.matches("#filter, [data-verdict]")) filter();
});
document.addEventListener("click", (event) => {
  const target = event.target;
  const cell = event.shiftKey && $("[data-compare]") && target.closest(EPISODES);
  if (cell) { event.preventDefault(); choose(cell); return; }
  if (target.closest("#theme")) toggleTheme();
  else if (target.closest("#keys")) $("#help").showModal();
  else if (target.closest("th[data-sort]")) sort(target.closest("th"));
  else if (target.dataset.turn) location.hash = `turn-${target.dataset.turn}`;
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (event.target.matches("th[data-sort]") && event.key === "Enter") sort(event.target);
  const figure = event.target.closest(".panel[data-steps]");
  const arrow = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (figure && arrow) {
    const num = figure.dataset.steps.split(",").length;
    figure.dataset.at = Math.max(0, Math.min(num - 1, Number(figure.dataset.at ?? num - 1 - arrow) + arrow));
    readChart(figure, figure.dataset.at / Math.max(num - 1, 1));
    event.preventDefault();
  } else if (arrow && $(".strip") && !isTyping) { walkToken(arrow); event.preventDefault(); }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    j: () => walk(1), k: () => walk(-1), "[": () => follow("a[rel=prev]"), "]": () => follow("a[rel=next]"),
    u: () => { const up = $$("header nav a:not([aria-current])"); if (up.length) location.href = up[up.length - 1].href; },
    "/": () => { const box = $("#filter"); if (box) { box.focus(); box.select(); } },
    e: toggleFolds, d: nextFar,
    x: () => choose(document.activeElement.closest(EPISODES) ?? $(`tr.here :is(${EPISODES})`)),
    t: toggleTheme, "?": () => $("#help").showModal(),
  };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});

// A running run: fetch the page again and swap its content, folds and filter kept.
async function refresh() {
  const busy = document.hidden || document.activeElement?.matches("input") || $("dialog[open]");
  if (busy) return;
  const live = $(".live");
  try {
    const answer = await fetch(location.href);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    live?.classList.remove("lost");
    if (!answer.ok || $("#main", next).innerHTML === shown) return;
    shown = $("#main", next).innerHTML;
    const open = $$("main details").map((each) => each.open);
    const typed = $("#filter")?.value, sorted = $$("th").findIndex((each) => each.hasAttribute("aria-sort"));
    const direction = $$("th")[sorted]?.getAttribute("aria-sort");
    const off = $$("[data-verdict]").filter((box) => !box.checked).map((box) => box.dataset.verdict);
    $("#main").replaceChildren(...$("#main", next).childNodes);
    $$("main details").forEach((each, n) => { each.open = open[n] ?? each.open; });
    if (typed) $("#filter").value = typed;
    $$("[data-verdict]").forEach((box) => { box.checked = !off.includes(box.dataset.verdict); });
    const head = $$("th")[sorted];
    if (head) { head.setAttribute("aria-sort", direction); sort(head, true); }
    filter();
    if (!next.body.dataset.live) { clearInterval(timer); live?.remove(); }
  } catch { live?.classList.add("lost"); }
}
let shown = "", timer = 0;
document.addEventListener("DOMContentLoaded", () => {
  shown = $("#main").innerHTML;
  markPicked();
  $$("th[data-sort]").forEach((head) => { head.tabIndex = 0; });
  const seconds = Number(document.body.dataset.live);
  if (seconds) timer = setInterval(refresh, seconds * 1000);
});
