// Messages as they are accepted, without consuming them.

import * as api from "../api.js";
import { el, emptyState, notice, put, uniqueId } from "../dom.js";
import { count, name, plural, protocolName, time } from "../format.js";
import { connectionLink, destinationLink, messageLink } from "../links.js";
import { payloadView, preview, propertiesView } from "../message_view.js";
import { publishDialog } from "../publish.js";

const SHOWN = 200;

export async function show(screen) {
  const { destination = "", filter = "" } = screen.query;
  screen.heading("Live tail", {
    subtitle: "Messages as the hub accepts them. None is consumed: consumers get them all the same.",
    actions: destination && !/[+#]/.test(destination) && !destination.startsWith("service/")
      ? el("button", { type: "button", onclick: () => publishDialog(destination) }, "Publish…") : null,
  });
  screen.root.append(form(screen, destination, filter));
  if (!destination) {
    screen.root.append(emptyState("Choose what to watch.", "A queue, topic or service, such as queue/orders; of topics also a pattern: topic/prices/#."));
    return;
  }
  watch(screen, destination, filter);
}

function form(screen, destination, filter) {
  const [where, what] = [uniqueId("tail"), uniqueId("tail")];
  const asked = el("input", { id: where, value: destination, placeholder: "queue/orders", required: true, autocomplete: "off", spellcheck: "false" });
  const passed = el("input", { id: what, value: filter, placeholder: "price > 10", autocomplete: "off", spellcheck: "false" });
  return el("form", { class: "filters", role: "search", "aria-label": "What to watch", onsubmit: (event) => {
    event.preventDefault();
    screen.setQuery({ destination: asked.value.trim(), filter: passed.value.trim() });
    screen.reload();
  } },
  el("div", { class: "field wide" }, el("label", { for: where }, "Destination"), asked),
  el("div", { class: "field" }, el("label", { for: what }, "Property filter"), passed),
  el("button", { type: "submit", class: "primary" }, "Watch"));
}

function watch(screen, destination, filter) {
  const status = el("span", { class: "tag", role: "status" }, "connecting");
  const counts = el("span", { class: "muted" });
  const problem = el("div", {});
  const list = el("ol", { class: "tail", "aria-label": "Messages, the newest first" });
  const waiting = emptyState("Waiting for messages.", "What is accepted from now on appears here. Earlier messages: ",
    el("a", { href: `#/messages?${new URLSearchParams({ destination })}` }, "search"), ".");
  const held = [];
  let isPaused = false;
  let total = 0;
  let lost = 0;
  const pause = el("button", { type: "button", "aria-pressed": "false", onclick: () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    put(pause, isPaused ? "Continue" : "Pause");
    if (!isPaused) for (const message of held.splice(0)) add(message);
    showCounts();
  } }, "Pause");
  const clear = el("button", { type: "button", onclick: () => { put(list); waiting.hidden = false; } }, "Clear");
  screen.root.append(problem, el("section", { class: "panel" },
    el("div", { class: "panel-head" }, el("h2", {}, destinationLink(destination), " ", status), el("div", { class: "actions" }, counts, pause, clear)), waiting, list));

  function showCounts() {
    put(counts, plural(total, "message"), lost ? `, ${count(lost)} not shown` : "", held.length ? `, ${count(held.length)} held back` : "");
  }

  function add(message) {
    waiting.hidden = true;
    list.prepend(entry(message));
    while (list.children.length > SHOWN) list.lastChild.remove();
  }

  const on = {
    state: (text, isLive) => { put(status, text); status.className = `tag ${isLive ? "good" : "warn"}`; },
    event: (kind, data) => {
      if (kind === "message") {
        total += 1;
        if (!isPaused) add(data);
        else if (held.push(data) > SHOWN) { held.shift(); lost += 1; }
      } else if (kind === "lost") lost += data.events;
      else if (kind === "end") put(problem, notice("warn", `The hub ended the stream: ${data.reason}`));
      else if (kind === "notice") put(problem, notice("info", data.text));
      showCounts();
    },
  };
  api.stream("/v1/tail", { destination, filter }, on, screen.signal).catch((error) => {
    put(status, "refused");
    status.className = "tag bad";
    waiting.hidden = true;
    screen.fail(error, problem);
  });
}

function entry(message) {
  const opened = el("div", { class: "opened" });
  const details = el("details", {}, el("summary", {}, time(message.time, { millis: true }), el("span", { class: "id" }, String(message.id)),
    el("span", { class: "muted" }, name([protocolName(message.protocol), message.principal].filter(Boolean).join(" · "))), preview(message)), opened);
  // Made when it is opened: a tail may show hundreds.
  details.addEventListener("toggle", () => {
    if (!details.open || opened.childElementCount) return;
    put(opened, el("p", {}, "Message ", messageLink(message.id), " to ", destinationLink(message.destination), " by ",
      protocolName(message.protocol), " ", message.connection ? connectionLink(message.connection) : ""), payloadView(message), propertiesView(message.properties));
  });
  return el("li", {}, details);
}
