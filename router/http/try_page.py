"""The page at /docs: every operation of the API document, with a form. One file that loads nothing from
elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tandem: try it</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
 h1 { font-size: 1.4rem; } code, textarea, pre, input { font: 14px/1.4 ui-monospace, monospace; }
 textarea { width: 100%; box-sizing: border-box; } pre { background: #f5f5f5; padding: .8rem; white-space: pre-wrap; }
 details { border: 1px solid #ddd; border-radius: 6px; margin: .6rem 0; padding: .5rem .8rem; }
 summary { cursor: pointer; } button { margin: .5rem .5rem .5rem 0; padding: .3rem 1rem; } .verb { color: #06c; }
</style></head><body>
<h1>Tandem</h1>
<p>OpenAI's API. The document: <a href="/openapi.json">/openapi.json</a>.
 Key, if one is needed: <input id="key" size="30" autocomplete="off"></p>
<div id="operations">loading…</div>
<script>
const examples = EXAMPLES;
const key = document.getElementById("key");
const headers = () => ({ "content-type": "application/json", ...(key.value ? { authorization: "Bearer " + key.value } : {}) });
function shown(data) {
  try {
    const choice = JSON.parse(data).choices[0];
    return choice ? (choice.text ?? choice.delta?.content ?? "") : "";
  } catch { return ""; }
}
async function read(answer, out) {
  out.textContent = answer.status + " " + answer.statusText + "\\n\\n";
  if (!(answer.headers.get("content-type") || "").startsWith("text/event-stream")) {
    const text = await answer.text();
    try { out.textContent += JSON.stringify(JSON.parse(text), null, 2); } catch { out.textContent += text; }
    return;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\\n").filter(l => l.startsWith("data: ")).map(l => l.slice(6)).join("\\n");
      out.textContent += event.startsWith("event: error") ? "\\n" + data : shown(data);
    }
  }
}
function operation(verb, path, about, model) {
  const box = document.createElement("details");
  box.innerHTML = `<summary><code><span class="verb">${verb.toUpperCase()}</span> ${path}</code> ${about.summary}</summary>`;
  const body = document.createElement("textarea");
  if (verb === "post") { body.rows = 8; body.value = JSON.stringify({ model, ...examples[path] }, null, 2); box.append(body); }
  const send = document.createElement("button"), stop = document.createElement("button"), out = document.createElement("pre");
  send.textContent = "Send"; stop.textContent = "Stop"; box.append(send, stop, out);
  let abort = new AbortController();
  stop.onclick = () => abort.abort();
  send.onclick = async () => {
    abort = new AbortController();
    try {
      const options = { method: verb.toUpperCase(), headers: headers(), signal: abort.signal };
      if (verb === "post") options.body = body.value;
      await read(await fetch(path.replace("{model}", model), options), out);
    } catch (error) { out.textContent += "\\n" + error; }
  };
  return box;
}
(async () => {
  const document_ = await (await fetch("/openapi.json")).json();
  let model = "";
  try { model = (await (await fetch("/v1/models", { headers: headers() })).json()).data[0].id; } catch {}
  const list = document.getElementById("operations");
  list.textContent = "";
  for (const [path, verbs] of Object.entries(document_.paths))
    for (const [verb, about] of Object.entries(verbs)) list.append(operation(verb, path, about, model));
})();
</script></body></html>
"""


def page_with(examples: Mapping[str, Any]) -> str:
    return _PAGE.replace("EXAMPLES", json.dumps(examples))
