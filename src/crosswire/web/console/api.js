// Requests to the hub's HTTP API with the token of this tab, and its streams of events.

const TOKEN = "crosswire-token";

/** A response with a status of 400 or more, or none at all (status 0). */
export class ApiError extends Error {
  constructor(status, code, description) {
    super(description);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** What the console does when the hub no longer accepts the token; `main.js` sets it. */
let onUnauthenticated = () => {};

export function whenUnauthenticated(act) {
  onUnauthenticated = act;
}

// In the tab only: it is gone when the tab is closed, and no other site or tab can read it.
export function token() {
  return sessionStorage.getItem(TOKEN);
}

export function setToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

/** A path with a name in it, which may contain anything: apiPath("/v1/queues", "a/b", "purge"). The
 * names `.` and `..`, which the browser would resolve, have a slash after them. */
export function apiPath(base, ...parts) {
  const encoded = (text) => encodeURIComponent(text === "." || text === ".." ? `${text}/` : text);
  return [base, ...parts.map((each) => encoded(String(each)))].join("/");
}

/** Parameters of `query` that are empty are left out; those in `path` are sent as they are. */
function address(path, query) {
  const given = Object.entries(query ?? {}).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given.map(([key, value]) => [key, String(value)])).toString();
  return text ? `${path}${path.includes("?") ? "&" : "?"}${text}` : path;
}

async function send(method, path, { query, body, signal, accept, asked = token() } = {}) {
  const headers = { accept: accept ?? "application/json" };
  if (asked) headers.authorization = `Bearer ${asked}`;
  if (method === "POST" || method === "PATCH") headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path, query), {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "same-origin",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The hub does not answer. It may be restarting.");
  }
  if (response.ok) return response;
  throw await failure(response, asked);
}

async function failure(response, asked) {
  let code = "failed";
  let description = `The hub answered with status ${response.status}.`;
  try {
    const found = await response.json();
    code = found.error ?? code;
    description = found.description ?? description;
  } catch {
    // Not JSON: a proxy in between has answered. The status is all there is to show.
  }
  const error = new ApiError(response.status, code, description);
  if (response.status === 401 && asked === token()) onUnauthenticated(error);
  return error;
}

// Numbers of payloads that JavaScript would round are kept as their text, so that a message is
// shown, and a dead letter saved, as it is. Where the browser can't do that they are rounded.
const hasSource = typeof JSON.rawJSON === "function";

function keepDigits(key, value, context) {
  if (typeof value !== "number" || !context?.source) return value;
  const digits = context.source.replace(/[^0-9]/g, "").length;
  return digits > 15 && String(value) !== context.source ? JSON.rawJSON(context.source) : value;
}

function parseExact(text) {
  return hasSource ? JSON.parse(text, keepDigits) : JSON.parse(text);
}

/** GET of something with payloads; see `keepDigits`. Raises ApiError. */
export async function getExact(path, query, signal) {
  return parseExact(await (await send("GET", path, { query, signal })).text());
}

/** GET; gives the decoded JSON. Raises ApiError. */
export async function get(path, query, signal) {
  return (await send("GET", path, { query, signal })).json();
}

export async function post(path, body, signal) {
  return (await send("POST", path, { body: body ?? {}, signal })).json();
}

export async function patch(path, body, signal) {
  return (await send("PATCH", path, { body, signal })).json();
}

export async function del(path, query, signal) {
  return (await send("DELETE", path, { query, signal })).json();
}

/** Who a token belongs to, before it is kept. Raises ApiError. */
export async function whoIs(asked) {
  return (await send("GET", "/v1/session", { asked })).json();
}

/** Sends a file's bytes; gives the decoded JSON. Raises ApiError. */
export async function upload(path, query, file, signal) {
  const headers = { "content-type": "application/octet-stream", accept: "application/json" };
  const asked = token();
  if (asked) headers.authorization = `Bearer ${asked}`;
  let response;
  try {
    response = await fetch(address(path, query), { method: "POST", headers, body: file, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The hub does not answer, or refused the upload.");
  }
  if (!response.ok) throw await failure(response, asked);
  return response.json();
}

// Streams of server-sent events. EventSource can't send the token, so fetch reads them.

const RETRY_MS = 2_000;

/**
 * Reads a stream of events until `signal` ends it. `on.event(name, data)` is called for each,
 * `on.state(text, isLive)` when it connects or is cut off. A stream that breaks is opened again;
 * one that the hub refuses or ends (`end`) is not: returns the reason.
 */
export async function stream(path, query, on, signal) {
  for (;;) {
    let ended = null;
    try {
      on.state?.("connecting", false);
      const response = await send("GET", path, { query, signal, accept: "text/event-stream" });
      on.state?.("live", true);
      ended = await read(response.body, on, signal);
    } catch (error) {
      if (signal.aborted) return "left";
      if (error instanceof ApiError && error.status !== 0 && error.status !== 503) throw error;
    }
    if (signal.aborted) return "left";
    if (ended !== null) {
      on.state?.(ended, false);
      return ended;
    }
    on.state?.("cut off, connecting again", false);
    await pause(RETRY_MS, signal);
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

async function read(body, on, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let reason = null;
  for (;;) {
    const { done, value } = await reader.read();
    if (done || signal.aborted) return reason;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = parse(part);
      if (found === null) continue;
      if (found.name === "end") reason = String(found.data.reason ?? "ended");
      on.event(found.name, found.data);
    }
  }
}

function parse(part) {
  let name = "message";
  let data = "";
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? { name, data: parseExact(data) } : null;
}
