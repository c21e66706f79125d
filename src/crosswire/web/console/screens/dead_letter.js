// A dead letter: why it died, its content with an editor, and what can be done with it.

import * as api from "../api.js";
import { purgeDialog, replayDialog } from "../dead_acts.js";
import { field, openDialog, toast } from "../dialog.js";
import { diffView } from "../diff.js";
import { el, emptyState, notice, put } from "../dom.js";
import { name, protocolName, time, visible } from "../format.js";
import { connectionLink, destinationLink, messageLink, toDeadLetters } from "../links.js";
import { facts, nativeFields, payloadText, payloadView, propertiesView } from "../message_view.js";
import { readPayload, readProperties } from "../publish.js";
import { go, href } from "../router.js";
import { plainTable } from "../table.js";

export async function show(screen) {
  const { queue, id } = screen.params;
  const letter = await api.getExact(api.apiPath("/v1/dead/letters", id), { queue }, screen.signal);
  const message = letter.message;
  const back = () => go(toDeadLetters(queue));
  const mayAct = screen.session.administer || queue.startsWith("@");
  screen.heading(`Dead letter ${id}`, {
    back: [["Dead letters", href("/dead")], [visible(queue), toDeadLetters(queue)]],
    subtitle: ["Cause: ", name(letter.cause || "none given")],
    actions: mayAct ? [
      el("button", { type: "button", class: "primary", onclick: () => replayDialog(queue, { ids: [letter.id] }, back) }, "Replay…"),
      el("button", { type: "button", class: "danger", onclick: () => purgeDialog(queue, { ids: [letter.id] }, back) }, "Delete…"),
    ] : null,
  });
  screen.root.append(el("div", { class: "columns" },
    el("div", {}, mayAct && !message.hidden ? editor(screen, queue, letter)
      : el("section", { class: "panel" }, el("h2", {}, "Payload"), payloadView(message)),
    mayAct ? null : el("section", { class: "panel" }, el("h2", {}, "Properties"), propertiesView(message.properties))),
    el("div", {},
      el("section", { class: "panel" }, el("h2", {}, "Attempts"), attempts(letter)),
      el("section", { class: "panel" }, el("h2", {}, "Facts"), facts([
        ["Came from", letter.origin ? destinationLink(letter.origin) : null],
        ["Was message", letter.origin_id ? messageLink(letter.origin_id) : null],
        ["Accepted there", time(letter.origin_time, { day: true })],
        ["Died", time(message.time, { day: true })],
        ["Steps of the letter", messageLink(letter.id)],
        ["Sent by", message.connection ? connectionLink(message.connection) : name(message.principal || protocolName(message.protocol))],
        ["Key", message.key ? name(message.key) : null],
        ["Correlation", message.correlation ? name(message.correlation) : null],
        ["Fields of its own protocol", nativeFields(message)],
      ])))));
}

function attempts(letter) {
  return plainTable({
    caption: "Attempts to deliver it",
    rows: letter.attempts,
    empty: emptyState("No attempt is recorded.", "It was sent to the dead letters directly, or expired."),
    columns: [
      { title: "Time", class: "nowrap", cell: (row) => time(row.time, { millis: true }) },
      { title: "Consumer", cell: (row) => connectionLink(row.connection) },
      { title: "Cause", cell: (row) => name(row.cause || "–") },
    ],
  });
}

// Editing.

function kindOf(message) {
  if (message.json !== undefined) return "json";
  return typeof message.text === "string" ? "text" : "base64";
}

function splitProperties(properties) {
  const isHubs = ([key]) => ["dead-cause", "dead-attempts", "dead-origin", "dead-id"].includes(key);
  const all = Object.entries(properties);
  return [Object.fromEntries(all.filter((each) => !isHubs(each))), Object.fromEntries(all.filter(isHubs))];
}

function editor(screen, queue, letter) {
  const { message } = letter;
  const kind = kindOf(message);
  const before = kind === "base64" ? message.base64 ?? "" : payloadText(message);
  // Why it died is the hub's own, and stays.
  const [own, hubs] = splitProperties(message.properties ?? {});
  const properties = JSON.stringify(own, null, 2);
  const label = { json: "Payload (JSON)", text: "Payload (text)", base64: "Payload (bytes in base64)" }[kind];
  const payload = field({ name: "payload", label, kind: "area", value: before, rows: Math.min(Math.max(before.split("\n").length + 1, 6), 24) });
  const given = field({ name: "properties", label: "Properties (JSON)", kind: "area", value: properties, rows: Math.min(properties.split("\n").length + 1, 12) });
  const type = field({ name: "content_type", label: "Content type", value: message.content_type });
  const difference = el("div", { "aria-live": "polite" });
  const save = el("button", { type: "button", class: "primary", onclick: confirmSave, disabled: true }, "Save…");
  const undo = el("button", { type: "button", disabled: true, onclick: () => {
    payload.input.value = before;
    given.input.value = properties;
    type.input.value = message.content_type;
    showDifference();
  } }, "Undo");
  for (const each of [payload, given, type]) each.input.addEventListener("input", showDifference);

  function isChanged() {
    return payload.value() !== before || given.value() !== properties || type.value() !== message.content_type;
  }

  function changes() {
    return [
      payload.value() === before ? null : diffView(before, payload.value(), "Difference of the payload"),
      given.value() === properties ? null : diffView(properties, given.value(), "Difference of the properties"),
      type.value() === message.content_type ? null : diffView(message.content_type, type.value(), "Difference of the content type"),
    ];
  }

  function showDifference() {
    save.disabled = undo.disabled = !isChanged();
    put(difference, isChanged() ? [el("h3", {}, "What changes"), changes()] : null);
  }

  function edit() {
    const asked = { queue };
    if (payload.value() !== before) Object.assign(asked, readPayload(kind, payload.value()));
    if (given.value() !== properties) asked.properties = { ...readProperties(given.value()), ...hubs };
    if (type.value() !== message.content_type) asked.content_type = type.value();
    return asked;
  }

  function confirmSave() {
    let asked;
    try {
      asked = edit();
    } catch (error) {
      put(difference, notice("bad", error.message), changes());
      return;
    }
    openDialog({
      title: "Save this dead letter?",
      text: changes(),
      action: "Save",
      act: async (values, report, signal) => {
        await api.patch(api.apiPath("/v1/dead/letters", letter.id), asked, signal);
        toast("good", "Saved. Replay it to send it again.");
        return null;
      },
      done: () => screen.reload(),
    });
  }

  return el("section", { class: "panel editor" }, el("h2", {}, "Content"),
    payload.element, given.element, type.element, difference, el("div", { class: "buttons" }, undo, save));
}
