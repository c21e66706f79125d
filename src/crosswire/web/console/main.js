// The console's frame: sign-in, navigation, what the hub's state is, and the current screen.

import * as api from "./api.js";
import { leaveDialogs } from "./dialog.js";
import { el, notice, put } from "./dom.js";
import { visible } from "./format.js";
import { href, isCurrent, go, start as startRouter, stop as stopRouter, navigate } from "./router.js";
import { ROUTES } from "./routes.js";
import { Screen } from "./screen.js";
import { signIn } from "./sign_in.js";
import { showStandby } from "./standby.js";
import { themeButton } from "./theme.js";

const SESSION_MS = 5_000;
const SLOW_MS = 150;

let session = null;
let screen = null;
let timer = 0;
const parts = {};

api.whenUnauthenticated(() => endSession("Your session has ended: the hub no longer accepts the token."));

async function begin() {
  try {
    session = await api.whoIs(api.token());
  } catch (error) {
    const isKnown = error.status === 401;
    endSession(isKnown ? (api.token() ? "The hub no longer accepts the token of this tab." : "") : error.message);
    return;
  }
  frame();
  clearInterval(timer);
  timer = setInterval(() => { if (!document.hidden) checkSession(); }, SESSION_MS);
  startRouter(ROUTES, show);
}

/** Rights, and which replica leads, may change while the console is open. */
async function checkSession() {
  try {
    const found = await api.whoIs(api.token());
    parts.offline.hidden = true;
    const isOther = JSON.stringify(found) !== JSON.stringify(session);
    const isOtherPage = found.role !== session.role || found.user !== session.user
      || found.administer !== session.administer || found.observe !== session.observe;
    session = found;
    if (isOther) { showNavigation(); showBanners(); }
    if (isOtherPage) navigate();
  } catch (error) {
    if (error.status === 0) parts.offline.hidden = false;
  }
}

function endSession(reason) {
  clearInterval(timer);
  stopRouter();
  screen?.leave();
  screen = null;
  session = null;
  api.setToken(null);
  leaveDialogs();
  document.querySelector(".toasts")?.remove();
  signIn(document.body, reason, begin);
}

// The frame around screens.

function frame() {
  parts.navigation = el("nav", { class: "navigation", id: "navigation", "aria-label": "Screens" });
  parts.main = el("main", { id: "main", tabindex: "-1" });
  parts.banners = el("div", { class: "banners" });
  parts.offline = el("div", { hidden: true }, notice("bad", "The hub does not answer. What is shown may be old."));
  parts.menu = el("button", { type: "button", class: "quiet menu", "aria-expanded": "false", "aria-controls": "navigation",
    onclick: () => openMenu(!document.body.classList.contains("menu-open")) },
    el("span", { "aria-hidden": "true" }, "☰"), el("span", { class: "unseen" }, "Menu"));
  put(document.body,
    el("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); parts.main.focus(); } }, "Skip to content"),
    el("header", { class: "top" }, parts.menu,
      el("a", { class: "brand", href: "#/" }, el("img", { src: "/console/icon.svg", alt: "", width: 24, height: 24 }), el("span", { class: "brand-text" }, "Crosswire")),
      el("span", { class: "node", title: "The name of the hub's data" }, el("bdi", {}, visible(session.node))),
      jump(), themeButton(), user()),
    parts.navigation,
    el("div", { class: "content" }, parts.banners, parts.main));
  showNavigation();
  showBanners();
}

function user() {
  if (session.open) return el("span", { class: "user" }, "no users");
  return el("span", { class: "user" }, el("bdi", { title: "Signed in as" }, visible(session.user)),
    api.token() ? el("button", { type: "button", class: "quiet", onclick: () => endSession("You are signed out.") }, "Sign out") : null);
}

function jump() {
  const input = el("input", { type: "search", placeholder: "Queue, message id or destination", "aria-label": "Go to a queue, a message id or a destination", autocomplete: "off", spellcheck: "false" });
  return el("form", { class: "jump", role: "search", onsubmit: (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    if (/^\d{1,19}$/.test(text)) go(href("/messages/:id", { id: text }));
    else if (/^(queue|topic|service)\//.test(text)) go(href("/messages", {}, { destination: text }));
    else go(href("/queues", {}, { contains: text }));
  } }, input);
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, textarea, select, dialog");
  if (event.key === "/" && !isTyping && session) {
    event.preventDefault();
    document.querySelector(".jump input")?.focus();
  }
  if (event.key === "Escape") openMenu(false);
});

function openMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  parts.menu?.setAttribute("aria-expanded", String(isOpen));
}

function showNavigation() {
  const groups = new Map();
  for (const route of ROUTES) {
    if (!route.group || (route.needs && !session[route.needs])) continue;
    if (!groups.has(route.group)) groups.set(route.group, []);
    groups.get(route.group).push(route);
  }
  put(parts.navigation, [...groups].map(([group, routes]) => el("section", {},
    el("h2", {}, group),
    el("ul", {}, routes.map((route) => el("li", {},
      el("a", { href: href(route.path), "aria-current": isCurrent(route.path) ? "page" : null }, route.title)))))));
}

function showBanners() {
  put(parts.banners, parts.offline,
    session.open ? notice("warn", "No users are configured: everybody who can reach this hub may do everything. ",
      "Add users to the configuration to change that.") : null);
}

// The current screen.

async function show(route, params, query) {
  screen?.leave();
  leaveDialogs();
  openMenu(false);
  const isFirst = screen === null;
  const root = el("div", { class: "screen" });
  const mine = screen = new Screen(root, params, query, session);
  showNavigation();
  // What is shown stays until the next screen is there, unless that takes long.
  const slow = setTimeout(() => {
    // Another one may have been asked for, and shown, while this one loads.
    if (screen === mine) put(parts.main, el("p", { class: "muted" }, "Loading…"));
  }, SLOW_MS);
  try {
    if (session.role === "standby") await showStandby(mine);
    else if (route === null) notFound(mine);
    else await (await route.load()).show(mine);
  } catch (error) {
    if (mine.signal.aborted) return;
    if (!root.querySelector("h1")) mine.heading(route?.title ?? "Error");
    mine.fail(error);
    root.append(wayOn(route, error));
  } finally {
    clearTimeout(slow);
  }
  if (screen !== mine) return;
  put(parts.main, root);
  parts.main.dataset.screen = location.hash;
  window.scrollTo(0, 0);
  for (const tabs of root.querySelectorAll(".tabs")) showCurrentTab(tabs);
  if (!isFirst) root.querySelector("h1")?.focus({ preventScroll: true });
}

/** On narrow screens tabs are wider than the screen: the current one must be in sight. */
function showCurrentTab(tabs) {
  const current = tabs.querySelector("[aria-current]")?.getBoundingClientRect();
  if (!current) return;
  const frame = tabs.getBoundingClientRect();
  tabs.scrollLeft += current.left + current.width / 2 - frame.left - frame.width / 2;
}

/** Where to go from a screen that could not be shown. */
function wayOn(route, error) {
  const list = ROUTES.find((each) => each.group && each.path.length > 1 && route?.path.startsWith(`${each.path}/`));
  return el("p", {}, el("button", { type: "button", onclick: () => navigate() }, "Try again"), " ",
    list && error.status === 404 ? el("a", { class: "button", href: href(list.path) }, `Go to ${list.title.toLowerCase()}`)
      : el("a", { class: "button", href: "#/" }, "Go to the overview"));
}

function notFound(mine) {
  mine.heading("There is no such screen");
  mine.root.append(el("p", {}, "The address may be incomplete. ", el("a", { href: "#/" }, "Go to the overview"), "."));
}

begin();
