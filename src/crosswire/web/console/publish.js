// Sending a message from the console.

import * as api from "./api.js";
import { openDialog } from "./dialog.js";
import { messageLink } from "./links.js";

/** Reads what was typed in as JSON, text or base64; raises an Error that names the mistake. */
export function readPayload(kind, text) {
  if (kind !== "json") return { [kind]: text };
  try {
    return { json: parseJson(text) };
  } catch (error) {
    throw new Error(`The payload is no JSON: ${error.message}`);
  }
}

/** JSON that was typed in, with numbers as they were written. */
export function parseJson(text) {
  if (typeof JSON.rawJSON !== "function") return JSON.parse(text);
  return JSON.parse(text, (key, value, context) =>
    (typeof value === "number" && context?.source ? JSON.rawJSON(context.source) : value));
}

/** Properties that were typed in as a JSON object; nothing for none. */
export function readProperties(text) {
  if (!text.trim()) return {};
  let found;
  try {
    found = parseJson(text);
  } catch (error) {
    throw new Error(`The properties are no JSON: ${error.message}`);
  }
  if (found === null || typeof found !== "object" || Array.isArray(found)) throw new Error("The properties must be a JSON object, such as {\"price\": 12}.");
  return found;
}

export function publishDialog(destination, done) {
  openDialog({
    title: "Publish a message",
    fields: [
      { name: "destination", label: "Destination", value: destination, required: true, hint: "queue/NAME or topic/NAME" },
      { name: "kind", label: "Payload is", kind: "select", value: "json", options: [["json", "JSON"], ["text", "text"], ["base64", "bytes in base64"]] },
      { name: "payload", label: "Payload", kind: "area", value: "{}", rows: 6 },
      { name: "properties", label: "Properties", kind: "area", value: "", rows: 2, placeholder: "{\"price\": 12}", hint: "A JSON object; values are numbers, booleans or texts." },
      { name: "key", label: "Key", hint: "Optional." },
    ],
    action: "Publish",
    act: async (values, report, signal) => {
      const message = { destination: values.destination.trim(), ...readPayload(values.kind, values.payload), properties: readProperties(values.properties) };
      if (values.key) message.key = values.key;
      const answer = await api.post("/v1/messages", { messages: [message] }, signal);
      return ["It is stored as message ", messageLink(answer.ids[0]), "."];
    },
    done,
  });
}
