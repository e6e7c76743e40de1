// Shows the episodes of a report: search, filters, a token-level view of log-prob mismatch, one prompt over time.
// All text of prompts and answers is set by textContent, so that it is never read as HTML.
"use strict";
(() => {
  let rows = [];
  const root = document.getElementById("samples");
  const PAGE_SIZE = 20;
  // A reload keeps what the reader has chosen.
  const memory = `headrace ${location.pathname}`;
  const plain = {search: "", set: "", show: "latest", from: "", to: "", prompt: null, tokens: {}, count: PAGE_SIZE};
  let state = {...plain};
  try { state = {...plain, ...JSON.parse(sessionStorage.getItem(memory))}; } catch { /* no storage in this browser */ }

  const make = headrace.make;
  // A log-prob that is null was not finite.
  const distance = (a, b) => a === null || b === null ? Infinity : Math.abs(a - b);
  const digits = value => value === null ? "not finite" : value.toFixed(4);
  const engineOf = row => row.turns.flatMap(turn => turn.logprobs || []);
  const complete = row => {
    const engine = engineOf(row), trainer = row.trained_logprobs;
    row.whole = trainer !== null && trainer.length > 0 && trainer.length === engine.length;
    row.mismatch = row.whole ? engine.reduce((sum, value, at) => sum + distance(trainer[at], value), 0) / engine.length
      : null;
    row.text = [row.prompt, ...row.turns.map(turn => turn.text), row.error].join("\n").toLowerCase();
  };

  const descending = key => (a, b) => b[key] - a[key];
  const shows = {
    latest: ["latest first", () => true, null],
    earliest: ["earliest first", () => true, "reverse"],
    best: ["best reward", row => row.reward !== null, descending("reward")],
    worst: ["worst reward", row => row.reward !== null, (a, b) => a.reward - b.reward],
    longest: ["longest", () => true, descending("response_tokens")],
    mismatch: ["largest mismatch", row => row.mismatch !== null, descending("mismatch")],
    truncated: ["truncated", row => row.finish_reason === "length", null],
    failed: ["failed", row => row.error !== "", null],
    untrained: ["not trained on", row => row.set === "train" && row.step === null, null],
  };

  const bar = make("div", "bar"), list = make("div"), note = make("span");
  const field = (name, element, title) => {
    element.value = state[name];
    element.title = title;
    element.setAttribute("aria-label", title);
    element.addEventListener("input", () => { state[name] = element.value; state.count = PAGE_SIZE; draw(); });
    bar.append(element);
    return element;
  };
  const input = (name, type, title) => {
    const element = make("input");
    element.type = type;
    element.placeholder = title;
    return field(name, element, title);
  };
  const fill = (element, options) => element.replaceChildren(...options.map(([value, label]) => {
    const option = make("option", "", label);
    option.value = value;
    return option;
  }));
  const select = (name, options, title) => {
    const element = make("select");
    fill(element, options);
    return field(name, element, title);
  };
  input("search", "search", "search prompts and answers");
  const choiceOfSet = select("set", [], "set of prompts");
  select("show", Object.entries(shows).map(([value, [label]]) => [value, label]), "which episodes");
  input("from", "number", "from step");
  input("to", "number", "to step");
  const back = make("button", "", "all prompts");
  back.addEventListener("click", () => { state.prompt = null; draw(); });
  bar.append(back, note);

  const chosen = () => {
    const [, belongs, order] = shows[state.show] || shows.latest;
    const wanted = state.search.toLowerCase();
    const from = state.from === "" ? -Infinity : Number(state.from), to = state.to === "" ? Infinity : Number(state.to);
    const bounded = state.from !== "" || state.to !== "";
    const found = rows.filter(row => belongs(row) && (!state.set || row.set === state.set)
      && (!bounded || (row.step !== null && row.step >= from && row.step <= to))
      && (state.prompt === null || row.prompt === state.prompt) && row.text.includes(wanted));
    if (state.prompt !== null) return found.sort((a, b) => (a.step ?? Infinity) - (b.step ?? Infinity));
    if (order === "reverse") return found;
    found.reverse();
    return order ? found.sort(order) : found;
  };

  const turnBox = (role, text) => {
    const box = make("div", `turn ${role}`);
    box.append(make("span", "", role), make("div", "", text));
    return box;
  };
  const tokenBox = (turn, trainer) => {
    const box = turnBox("policy", ""), letters = Array.from(turn.text);
    let at = 0;
    turn.lengths.forEach((length, index) => {
      const text = letters.slice(at, at + length).join(""), engine = turn.logprobs[index], own = trainer[index];
      const mark = make("mark", "", text);
      // Fully coloured from a distance of 1 on, where the two probabilities differ by a factor of e.
      mark.style.setProperty("--d", Math.min(100, 100 * distance(own, engine)).toFixed(0));
      mark.title = `engine ${digits(engine)}, trainer ${digits(own)}, difference ${distance(own, engine).toFixed(4)}`;
      box.lastChild.append(mark);
      at += length;
    });
    return box;
  };

  const draw = () => {
    try { sessionStorage.setItem(memory, JSON.stringify(state)); } catch { /* no storage in this browser */ }
    const found = chosen();
    back.hidden = state.prompt === null;
    note.textContent = `${found.length} of ${rows.length} episodes`;
    list.replaceChildren(...found.slice(0, state.count).map(drawRow));
    if (found.length > state.count) {
      const more = make("button", "", "show more");
      more.addEventListener("click", () => { state.count += PAGE_SIZE; draw(); });
      list.append(more);
    }
  };
  const drawRow = row => {
    const box = make("div", "sample"), facts = make("div", "facts");
    const identity = `${row.set} ${row.key} ${row.version}`;
    const fact = (label, value, bad) => {
      const element = make("span", bad ? "bad" : "", `${label} `);
      element.append(make("b", "", value));
      facts.append(element);
    };
    fact(row.set, row.key);
    fact("step", row.step === null ? "not trained on" : row.step);
    fact("version", [...new Set(row.versions)].join("-"));
    fact("reward", row.reward === null ? "none" : row.reward.toPrecision(4).replace(/\.?0+$/, ""), row.error !== "");
    if (Object.keys(row.rewards).length > 1)
      for (const [name, value] of Object.entries(row.rewards)) fact(name, +value.toFixed(4));
    if (row.advantage !== null) fact("advantage", row.advantage.toFixed(3));
    fact("tokens", row.response_tokens);
    fact("end", row.finish_reason, row.finish_reason === "length");
    if (row.mismatch !== null) fact("mismatch", row.mismatch.toFixed(4));
    const same = make("button", "", "this prompt over time");
    same.addEventListener("click", () => { state.prompt = row.prompt; state.count = PAGE_SIZE; draw(); });
    if (state.prompt === null) facts.append(same);
    if (row.whole) {
      const tokens = make("button", "", state.tokens[identity] ? "plain text" : "tokens");
      tokens.title = "colours tokens by how far the trainer's log-prob is from the engine's";
      tokens.addEventListener("click", () => { state.tokens[identity] = !state.tokens[identity]; draw(); });
      facts.append(tokens);
    }
    box.append(facts);
    if (row.error) box.append(make("div", "bad", row.failure ? `${row.failure}: ${row.error}` : row.error));
    box.append(turnBox("prompt", row.prompt));
    let at = 0;
    for (const turn of row.turns) {
      const count = (turn.logprobs || []).length;
      const byToken = turn.role === "policy" && row.whole && state.tokens[identity];
      box.append(byToken ? tokenBox(turn, row.trained_logprobs.slice(at, at + count)) : turnBox(turn.role, turn.text));
      at += count;
    }
    if (row.tokens_left_out) box.append(make("small", "", `${row.tokens_left_out} tokens in the middle are left out`));
    if (row.answer) box.append(turnBox("expected", row.answer));
    return box;
  };

  root.append(make("h2", "", "Samples"), bar, list);
  headrace.showSamples = found => {
    rows = found;
    rows.forEach(complete);
    root.hidden = !rows.length;
    fill(choiceOfSet, [["", "all sets"], ...[...new Set(rows.map(row => row.set))].map(set => [set, set])]);
    choiceOfSet.value = state.set;
    draw();
  };
  headrace.showSamples(JSON.parse(document.getElementById("samples-data").textContent));
})();
