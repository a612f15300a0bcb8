"use strict";
const $ = id => document.getElementById(id);
const KEPT = "tokenswift.chat", TRIES = 300, FRAME = 150, NEAR = 60, SHARE = 5, COPIED = 1500;
const NUMBERS = ["max_output_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed"];
const FIELDS = ["system", ...NUMBERS, "strategy"];
// A message of the model has a text, a thought, figures (in words), a seed, an end ("" while it is written), and until the
// server is done with it what it takes to find it there: asked {body, name, cancel}.
let talk = [], gone = [], live = null, reading = null;  // gone: of earlier talks, still to be stopped
const views = new WeakMap();

function say(text, bad) { $("state").textContent = text; $("state").classList.toggle("bad", !!bad); }
function element(tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}
function headers() {
  const key = sessionStorage.getItem(KEPT);
  return {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {})};
}
function keep() {
  const form = Object.fromEntries(FIELDS.map(id => [id, $(id).value]));
  try { localStorage.setItem(KEPT, JSON.stringify({form, talk, gone: gone.filter(m => m.asked)})); }
  catch { say("The browser's storage is full: the conversation is no longer saved.", true); }
}
const textOf = m => (m.role === "user" ? m.content : m.text) || "";

// ---- what is seen

function button(name, label, act) {
  const made = element("button", name, label);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}
function copyButton(textOf) {
  const made = button("copy", "Copy", async () => {
    made.textContent = await copied(textOf()) ? "Copied" : "Not copied";
    setTimeout(() => { made.textContent = "Copy"; }, COPIED);
  });
  return made;
}
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // not from this address: browsers have a clipboard for https and this machine alone
    const area = element("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
function show(m) {
  const ofUser = m.role === "user", box = element("article", m.role), text = element("div", "text"), seen = {box, text};
  box.append(element("h2", ofUser ? "unseen" : "", ofUser ? "You" : "Answer"));
  if (ofUser) text.textContent = m.content;
  else box.append(thoughts(m, seen));
  box.append(text);
  if (!ofUser) box.append(seen.note = element("p", "note"));
  box.append(seen.tools = element("p", "tools"));
  seen.tools.append(copyButton(() => textOf(m)));
  seen.tools.append(ofUser ? button("change", "Edit", () => edit(m)) : button("again", "Regenerate", () => again(m)));
  views.set(m, seen);
  $("log").append(box);
  $("hint").hidden = true;
  if (!ofUser) draw(m, true);
  $("log").scrollTop = $("log").scrollHeight;
}
function thoughts(m, seen) {
  const box = element("details", "thoughts");
  box.hidden = true;
  seen.thoughts = box;
  seen.thought = element("div", "text");
  box.append(element("summary", "", "Thoughts"), seen.thought);
  box.querySelector("summary").addEventListener("click", () => { seen.chosen = true; });
  return box;
}
const ENDS = {length: "Ended: as many tokens as were asked for (Settings).", full: "Ended: there is no room for more tokens.",
  loop: "Stopped: it repeats itself.", stopped: "Stopped.", lost: "The server no longer has this answer."};
// Draws an answer as it is now, or a little later: at most a fifth of the time is spent on that.
function draw(m, now) {
  const seen = views.get(m);
  if (!seen) return;
  const began = performance.now();
  if (!now && began - seen.drawn < Math.max(FRAME, SHARE * seen.cost)) {
    seen.later ??= setTimeout(draw, FRAME, m, true);
    return;
  }
  clearTimeout(seen.later);
  seen.later = undefined;
  const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  drawThought(m, seen);
  Markdown.draw(seen.text, m.text, copyButton);
  seen.box.classList.toggle("writing", !m.end);
  seen.note.textContent = m.end === "failed" ? m.error : [ENDS[m.end], m.figures].filter(Boolean).join(" ");
  seen.note.classList.toggle("bad", m.end === "failed" || m.end === "lost");
  if (follows) log.scrollTop = log.scrollHeight;
  seen.drawn = performance.now();
  seen.cost = seen.drawn - began;
}
// A thought is open while it comes, and closes when the answer begins, unless somebody has opened or closed it.
function drawThought(m, seen) {
  seen.thoughts.hidden = !m.thought;
  if (!m.thought) return;
  if (!seen.chosen) seen.thoughts.open = !m.end && !m.text;
  seen.thought.textContent = m.thought;
}

// ---- an answer

function take(m, event) {
  if (event.sequence_number <= m.number && event.type !== "response.failed") return false;
  m.number = event.sequence_number;
  if (event.response?.usage) {
    const tokens = event.response.usage.output_tokens, {seed, steps} = event.response.tokenswift;
    m.seed = seed;
    m.figures = `${tokens.toLocaleString()} ${tokens === 1 ? "token" : "tokens"}; ${(tokens / Math.max(1, steps)).toFixed(1)} tokens a step; seed ${seed}.`;
  }
  if (event.type === "response.output_text.delta") {
    m.text += event.delta;
    draw(m);
    say("Writing …");
  }
  if (event.type === "response.reasoning_text.delta") {
    m.thought = (m.thought || "") + event.delta;
    draw(m);
    say("Thinking …");
  }
  if (event.type === "response.completed") return end(m, event.response.tokenswift.ended_by === "loop" ? "loop" : "done");
  if (event.type === "response.failed") return end(m, "failed", event.response.error.message);
  if (event.type === "response.incomplete" && event.response.incomplete_details)
    return end(m, m.asked?.body.max_output_tokens ? "length" : "full");
  if (event.type === "response.incomplete" && event.response.status === "cancelled") return end(m, "stopped");
  return false;  // a server that ended goes on when it is there again
}
function end(m, how, error) {
  m.end = how;
  if (error) m.error = error;
  if (how !== "stopped" || !m.asked?.cancel) delete m.asked;
  delete m.number;
  if (live === m) live = null;
  draw(m, true);
  buttons();
  say(how === "failed" || how === "lost" ? "There is no answer." : "Ready.", how === "failed" || how === "lost");
  keep();
  return true;
}
// Whether the stream had the end of the answer.
async function read(m, response) {
  const lines = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const {done, value} = await lines.read();
    if (done) return false;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const line of parts)
      if (live === m && line.startsWith("data: ") && take(m, JSON.parse(line.slice(6)))) return true;
  }
}
function open(m, signal) {
  const {body, name} = m.asked;
  if (name) return fetch(`v1/responses/${name}?stream=true&starting_after=${m.number}`, {headers: headers(), signal});
  return fetch("v1/responses", {method: "POST", headers: headers(), body: JSON.stringify(body), signal});
}
// Follows an answer to its end. A lost connection is taken up where it was, also by a page that was loaded again and
// with a server that was started again.
async function follow(m) {
  await lead(m);
  if (m.asked?.cancel) cancel(m);
}
async function lead(m) {
  live = m;
  m.number = -1;
  buttons();
  say("Processing the prompt …");
  for (let tries = 0; tries < TRIES && live === m; tries++) {
    try {
      reading = new AbortController();
      const response = await open(m, reading.signal);
      if (response.ok) {
        m.asked.name = response.headers.get("x-answer-id");
        keep();
        if (live !== m) { reading.abort(); return; }
        if (m.number < 0) m.text = m.thought = "";
        tries = 0;
        if (await read(m, response)) return;
        if (live === m) say("The connection was lost; trying again …", true);
      } else {
        const {error} = await response.json();
        if (response.status === 401) { locked(); live = null; buttons(); return; }
        if (response.status === 404 && m.asked.name) { end(m, "lost"); return; }
        if (response.status < 500 && response.status !== 429) { end(m, "failed", error.message); return; }
        say(error.message + "; trying again …", true);
      }
    } catch {
      if (live === m) say("The server does not answer; trying again …", true);
    }
    if (live === m) await new Promise(done => setTimeout(done, 1000));
  }
  if (live === m) { live = null; buttons(); say("The server does not answer. Reload the page to continue.", true); }
}
// The end is seen at once; the server is told as soon as the answer has a name, if need be after the next load.
function stop() {
  const m = live;
  if (!m) return;
  m.asked.cancel = true;
  end(m, "stopped");
  if (m.asked.name) reading.abort();
}
async function cancel(m) {
  if (!m.asked.name) { delete m.asked; keep(); return; }  // the server never had it
  for (let tries = 0; tries < TRIES && m.asked; tries++) {
    try {
      const response = await fetch(`v1/responses/${m.asked.name}/cancel`, {method: "POST", headers: headers(), keepalive: true});
      if (response.status < 500) { delete m.asked; keep(); }
    } catch {
      if (tries === 2) say("The server does not answer; stopping is tried again.", true);
    }
    if (m.asked) await new Promise(done => setTimeout(done, 1000));
  }
}

// ---- asking

function ask(text, more = {}) {
  const input = [];
  talk.forEach((m, i) => {  // what had no answer is not told again
    if (m.role === "assistant" && textOf(m))
      input.push({role: "user", content: talk[i - 1].content}, {role: "assistant", content: textOf(m)});
  });
  const system = $("system").value.trim(), body = {background: true, stream: true};
  body.tokenswift = {strategy: $("strategy").value || "auto", on_loop: "copies"};
  body.input = input.length ? [...input, {role: "user", content: text}] : text;
  if (system) body.instructions = system;
  for (const id of NUMBERS) if ($(id).value !== "") body[id] = Number($(id).value);
  Object.assign(body, more);
  const said = {role: "user", content: text}, m = {role: "assistant", text: "", thought: "", end: "", asked: {body}};
  talk.push(said, m);
  show(said);
  show(m);
  keep();
  follow(m);
}
// Whether a question may be sent now; says what is in the way.
function mayAsk() {
  if (live) return false;
  if (!$("settings").checkValidity()) { $("panel").open = true; $("settings").reportValidity(); return false; }
  if (!$("locked").hidden) { $("key").focus(); return false; }
  return true;
}
// Takes a message and all behind it out of the conversation.
function cut(from) {
  const behind = talk.slice(from);
  behind.forEach(m => views.get(m).box.remove());
  gone = [...gone, ...behind].filter(m => m.asked);
  talk = talk.slice(0, from);
  $("hint").hidden = talk.length > 0;
}
// The same question once more; a seed that was asked for would give the same answer.
function again(m) {
  const place = talk.indexOf(m);
  if (place < 1 || !mayAsk()) return;
  const {content} = talk[place - 1], more = $("seed").value !== "" && m.seed !== undefined ? {seed: m.seed + 1} : {};
  cut(place - 1);
  ask(content, more);
}
function edit(m) {
  const {text, tools, box} = views.get(m), form = element("form", "edit"), area = element("textarea"), row = element("p", "row");
  const close = () => { form.remove(); text.hidden = tools.hidden = false; };
  area.value = m.content;
  area.rows = Math.min(12, m.content.split("\n").length + 1);
  area.setAttribute("aria-label", "Your question");
  row.append(button("", "Cancel", close), element("button", "first", "Send"));
  form.append(area, row);
  form.addEventListener("submit", event => {
    event.preventDefault();
    const words = area.value.trim();
    if (!words || !mayAsk()) return;
    cut(talk.indexOf(m));
    ask(words);
  });
  area.addEventListener("keydown", event => {
    if (sends(event)) { event.preventDefault(); form.requestSubmit(); }
    if (event.key === "Escape") { event.stopPropagation(); close(); }
  });
  text.hidden = tools.hidden = true;
  box.append(form);
  area.focus();
}
const sends = event => event.key === "Enter" && !event.shiftKey && !event.isComposing;
function buttons() {
  const focused = document.activeElement === $("send") || document.activeElement === $("stop");
  $("stop").hidden = !live;
  $("send").hidden = !!live;
  document.body.classList.toggle("live", !!live);
  if (focused) $("prompt").focus();
}
function locked() { $("locked").hidden = false; $("key").focus(); say("This server asks for an API key.", true); }
async function begin() {
  const response = await fetch("v1/models", {headers: headers()});
  if (response.status === 401) { locked(); return; }
  $("locked").hidden = true;
  $("model").textContent = (await response.json()).data[0].id;
  say("Ready.");
  for (const m of [...talk, ...gone]) if (m.asked?.cancel) cancel(m);
  const last = talk[talk.length - 1];
  if (last?.asked && !last.end && !live) follow(last);
}
const reached = () => begin().catch(() => say("The server does not answer. Reload the page to try again.", true));

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("prompt").value.trim(), last = talk[talk.length - 1];
  if (!text || live) return;
  if (last?.asked && !last.end) { follow(last); return; }
  if (!mayAsk()) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", event => {
  if (sends(event)) { event.preventDefault(); $("ask").requestSubmit(); }
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && live) stop(); });
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  stop();
  cut(0);
  keep();
  $("prompt").focus();
});
$("locked").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEPT, $("key").value);
  $("prompt").focus();
  reached();
});
$("settings").addEventListener("submit", event => event.preventDefault());
$("settings").addEventListener("change", keep);
addEventListener("pagehide", keep);

try {
  const kept = JSON.parse(localStorage.getItem(KEPT) || "{}");
  for (const id of FIELDS) if (kept.form?.[id]) $(id).value = kept.form[id];
  [talk, gone] = [kept.talk || [], kept.gone || []];
  talk.forEach(show);
} catch { localStorage.removeItem(KEPT); location.reload(); }  // not what this page has written
$("prompt").focus();
reached();
