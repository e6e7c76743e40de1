// Draws a page from its data: the run's state, cards, curves and tables; a live page also asks its server for more.
// All text is set by textContent, so that it is never read as HTML.
"use strict";
const headrace = (() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const POLL_MS = 3000, STALE_S = 300, SAMPLES_MS = 30000;
  // A reload keeps what the reader has chosen.
  const memory = `headrace plots ${location.pathname}`;
  const choice = {smoothing: 3, hidden: {}};
  try { Object.assign(choice, JSON.parse(sessionStorage.getItem(memory))); } catch { /* no storage in this browser */ }
  const remember = () => { try { sessionStorage.setItem(memory, JSON.stringify(choice)); } catch { /* as above */ } };

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const main = document.querySelector("main"), header = document.querySelector("header");
  const place = (tag, className) => { const element = make(tag, className); main.append(element); return element; };
  const state = make("span", "state"), detail = make("p", "detail");
  header.append(state);
  header.after(detail);
  const cards = place("div", "cards");
  const early = data.tables_first ? place("div", "tables first") : null;
  const tools = place("div", "tools"), plots = place("div", "plots"), tables = early || place("div", "tables");
  const config = place("details"), samples = place("section", "samples");
  samples.id = "samples";

  // increment: distance of the labels of an axis, which decides their digits.
  const number = (value, increment) => {
    const size = Math.abs(value);
    if (increment && size < 1e4 && size > 999 * increment) return value.toFixed(Math.ceil(-Math.log10(increment)));
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
    return size && size < 1e-3 ? value.toExponential(1) : `${+value.toPrecision(5)}`;
  };

  // ---------------- the top of the page

  const drawState = lost => {
    const run = data.state;
    if (!run) return;
    const stale = run.kind === "running" && run.age_s >= STALE_S;
    const silent = stale ? `; no new figures for ${Math.floor(run.age_s / 60)} min` : "";
    state.textContent = run.text + silent;
    state.className = `state ${lost || silent ? "failed" : run.kind}`;
    detail.textContent = [run.detail, lost].filter(Boolean).join(" ");
  };
  const trend = (key, colour) => {
    const values = ((data.columns || {})[key] || [[], []])[1];
    if (values.length < 3) return null;
    const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
    const line = document.createElementNS(space, "polyline");
    const low = Math.min(...values), high = Math.max(...values);
    const points = values.map((value, at) => `${(100 * at / (values.length - 1)).toFixed(1)},`
      + `${(high > low ? 22 - 20 * (value - low) / (high - low) : 12).toFixed(1)}`);
    line.setAttribute("points", points.join(" "));
    line.style.stroke = `var(--${colour})`;
    svg.setAttribute("viewBox", "0 0 100 24");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    svg.append(line);
    return svg;
  };
  const drawCards = () => cards.replaceChildren(...(data.cards || []).map((card, at) => {
    const box = make("div", card.bad ? "card lost" : "card");
    const line = card.key && trend(card.key, at ? "blue" : "orange");
    box.append(make("span", "", card.label), make("b", "", card.value), make("small", "", card.small));
    if (line) box.append(line);
    return box;
  }));

  // ---------------- the tables

  const drawTables = () => {
    tables.replaceChildren(...(data.tables || []).map(table => {
      const box = make("section"), body = make("tbody"), head = make("thead"), row = make("tr"), grid = make("table");
      row.append(...table.head.map(text => make("th", "", text)));
      head.append(row);
      for (const cells of table.rows) {
        const line = make("tr");
        line.append(...cells.map((text, at) => make(at ? "td" : "th", "", text)));
        body.append(line);
      }
      grid.append(head, body);
      if (table.head.length !== 3) box.className = "broad";
      box.tabIndex = 0;
      box.append(make("h2", "", table.title), grid);
      return box;
    }));
    config.hidden = !data.config;
    config.replaceChildren(make("summary", "", "config.yaml"), make("pre", "", data.config));
  };

  // ---------------- the curves

  const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const charts = [];
  let zoom = {}; // unit of the x-axis -> the range that the reader has chosen

  // Centred moving average. Near both ends, the window is cut off at the end.
  const smooth = values => {
    const reach = Math.round(values.length * choice.smoothing / 90), sums = [0];
    if (!reach) return values;
    for (const value of values) sums.push(sums[sums.length - 1] + value);
    return values.map((_, at) => {
      const from = Math.max(0, at - reach), to = Math.min(values.length, at + reach + 1);
      return (sums[to] - sums[from]) / (to - from);
    });
  };
  // The arrays that uPlot draws: the places, and for each series its values, and if it is smoothed, the averages.
  const arrays = panel => {
    const columns = panel.series.map(series => data.columns[series.key] || [[], []]);
    if (panel.stacked) {
      const all = [...new Set(columns.flatMap(column => column[0]))].sort((a, b) => a - b), total = all.map(() => 0);
      const layers = columns.map(([steps, values], at) => {
        if (isHidden(panel, panel.series[at])) return all.map(() => null);
        const found = new Map(smooth(values).map((value, index) => [steps[index], value]));
        return all.map((step, index) => total[index] += found.get(step) || 0);
      });
      return [all, ...layers.reverse()]; // The tallest layer is drawn first, the others over it.
    }
    const parts = columns.flatMap(([steps, values], at) =>
      panel.series[at].sparse ? [[steps, values]] : [[steps, values], [steps, smooth(values)]]);
    return parts.length ? uPlot.join(parts) : [[]];
  };
  const identity = (panel, series) => `${panel.title} ${series.label.replace(/ \d+%$/, "")} ${series.key}`;
  const isHidden = (panel, series) => Boolean(choice.hidden[identity(panel, series)]);
  const yRange = panel => (chart, low, high) => {
    for (const [, value] of panel.lines) { low = Math.min(low ?? value, value); high = Math.max(high ?? value, value); }
    if (low === null || low === undefined) return [0, 1];
    if (panel.scale === "share" && low >= 0 && high <= 1) return [-0.03, 1.03];
    if (panel.stacked) {
      // A long first step with loading and compiling would flatten all others.
      const tops = [...chart.data[chart.data.length > 1 ? 1 : 0]].filter(Number.isFinite).sort((a, b) => a - b);
      const typical = tops[Math.floor(0.9 * (tops.length - 1))];
      if (high > 2.5 * typical && typical > 0) high = 1.6 * typical;
    }
    if ((panel.scale === "zero" || panel.stacked) && low >= 0) return [0, 1.08 * high || 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low - margin, high + margin];
  };
  const show = (chart, values, at) => {
    const xs = chart.data[0], unit = chart.panel.x;
    chart.where.textContent = at === null ? "" : unit === "step" ? `step ${number(xs[at])}` : `${number(xs[at])} min`;
    for (const [series, element] of values) {
      const [steps, own] = data.columns[series.key] || [[], []];
      let found = -1; // the last point that is not after the cursor
      if (at !== null)
        for (let low = 0, high = steps.length - 1; low <= high;) {
          const middle = (low + high) >> 1;
          if (steps[middle] <= xs[at]) { found = middle; low = middle + 1; } else high = middle - 1;
        }
      element.textContent = found < 0 ? "" : number(own[found]);
    }
  };
  const zoomTo = (unit, range) => {
    zoom[unit] = range;
    for (const chart of charts) {
      if (chart.panel.x !== unit || !chart.data[0].length) continue;
      const xs = chart.data[0];
      chart.setScale("x", range || {min: xs[0], max: xs[xs.length - 1]});
    }
    whole.hidden = !Object.values(zoom).some(Boolean);
  };
  const moveBy = (chart, event) => {
    const xs = chart.data[0], step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") return zoomTo(chart.panel.x, null);
    if (!step || !xs.length) return undefined;
    event.preventDefault();
    const at = Math.max(0, Math.min(xs.length - 1, (chart.cursor.idx ?? (step > 0 ? -1 : xs.length)) + step));
    return chart.setCursor({left: chart.valToPos(xs[at], "x"), top: 1}, true, true);
  };
  const wholeNumbers = [...Array(12).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));
  const axis = (side, unit) => ({
    stroke: colourOf("ink"), font: "11px system-ui, sans-serif", gap: 4,
    size: (_chart, labels) => side === "x" ? 26
      : Math.max(36, 6.5 * Math.max(...(labels || [""]).map(text => text.length)) + 12),
    ...(unit === "step" ? {incrs: wholeNumbers} : {}),
    grid: {stroke: colourOf("grid"), width: 1, show: side === "y"}, ticks: {show: false},
    values: (_chart, splits, _axis, _space, increment) =>
      splits.map(value => number(value, increment) + (unit === "min" ? " min" : "")),
    ...(side === "x" ? {space: 60} : {space: 34}),
  });
  const lines = panel => chart => {
    const {ctx, bbox} = chart;
    ctx.save();
    ctx.strokeStyle = colourOf("ink");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const [, value] of panel.lines) {
      const y = chart.valToPos(value, "y", true);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  };
  const drawn = (panel, series) => {
    const colour = colourOf(series.colour), dash = series.dashed ? [6, 4] : undefined;
    const base = {stroke: colour, dash, show: !isHidden(panel, series), spanGaps: true, points: {show: false}};
    if (panel.stacked) return [{...base, width: 0, fill: colour, show: true}];
    if (series.sparse) return [{...base, width: 2, points: {show: true, size: 6, fill: colour, stroke: colour}}];
    return [{...base, width: 1, stroke: `${colour}55`}, {...base, width: 2}];
  };
  const chartOf = (panel, label, box) => {
    const head = make("ul"), where = make("li", "where"), canvas = make("div", "chart"), values = [];
    for (const series of panel.series) {
      const item = make("li"), button = make("button", "", series.label), value = make("b");
      button.style.setProperty("--c", `var(--${series.colour})`);
      if (series.dashed) button.classList.add("dashed");
      button.append(" ", value);
      button.setAttribute("aria-pressed", String(!isHidden(panel, series)));
      button.title = panel.series.length > 1 ? "show or hide this curve" : series.key;
      button.disabled = panel.series.length < 2;
      button.addEventListener("click", () => {
        choice.hidden[identity(panel, series)] = !isHidden(panel, series);
        button.setAttribute("aria-pressed", String(!isHidden(panel, series)));
        remember();
        redraw(panel);
      });
      item.append(button);
      head.append(item);
      values.push([series, value]);
    }
    for (const [text] of panel.lines) head.append(make("li", "line", text));
    head.append(where);
    if (panel.title) box.append(make("h3", "", panel.title));
    box.append(head, canvas);
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "group");
    canvas.setAttribute("aria-label", `${label}: the arrow keys move along the x-axis`);
    const order = panel.stacked ? [...panel.series].reverse() : panel.series;
    const chart = new uPlot({
      width: 300, height: 200, legend: {show: false}, padding: [8, 10, 0, 0],
      scales: {x: {time: false}, y: {range: yRange(panel)}},
      axes: [axis("x", panel.x), axis("y", "")],
      series: [{}, ...order.flatMap(series => drawn(panel, series))],
      cursor: {
        y: false, points: {size: 6, show: !panel.stacked}, drag: {x: true, y: false, setScale: false},
        sync: {key: `headrace-${panel.x}`, filters: {pub: type => type === "mousemove" || type === "mouseleave"}},
        bind: {dblclick: () => () => { zoomTo(panel.x, null); return null; }},
      },
      hooks: {
        draw: [lines(panel)],
        setCursor: [chart => show(chart, values, chart.cursor.idx ?? null)],
        setSelect: [chart => {
          const {left, width} = chart.select;
          if (width < 4) return;
          chart.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
          zoomTo(panel.x, {min: chart.posToVal(left, "x"), max: chart.posToVal(left + width, "x")});
        }],
      },
    }, arrays(panel), canvas);
    Object.assign(chart, {panel, where});
    canvas.addEventListener("keydown", event => moveBy(chart, event));
    new ResizeObserver(() => chart.setSize({width: canvas.clientWidth, height: canvas.clientHeight})).observe(canvas);
    charts.push(chart);
  };
  const redraw = only => {
    for (const chart of charts) {
      const panel = chart.panel;
      if (only && only !== panel) continue;
      let at = 1;
      if (!panel.stacked)
        for (const series of panel.series)
          for (const end = at + (series.sparse ? 1 : 2); at < end; at++)
            chart.series[at].show = !isHidden(panel, series);
      chart.setData(arrays(panel), !zoom[panel.x]);
      if (zoom[panel.x]) chart.setScale("x", zoom[panel.x]);
    }
  };
  let spec = "";
  const drawPlots = () => {
    const now = JSON.stringify(data.plots);
    if (now === spec) return redraw();
    spec = now;
    for (const chart of charts.splice(0)) chart.destroy();
    plots.replaceChildren(...(data.plots || []).map(plot => {
      const figure = make("figure", plot.wide ? "wide" : ""), inner = make("div", "panels");
      figure.append(make("h2", "", plot.title), inner);
      inner.classList.toggle("one", plot.panels.length === 1);
      inner.classList.toggle("even", [2, 4].includes(plot.panels.length));
      figure.panels = plot.panels.map(panel => {
        const box = make("div");
        inner.append(box);
        return () => chartOf(panel, [plot.title, panel.title].filter(Boolean).join(", "), box);
      });
      if (plot.note) figure.append(make("p", "", plot.note));
      return figure;
    }));
    for (const figure of plots.children) for (const draw of figure.panels) draw();
    for (const [unit, range] of Object.entries(zoom)) if (range) zoomTo(unit, range);
    return undefined;
  };
  const slider = make("input"), label = make("label", "", "smoothing ");
  const whole = make("button", "", "show the whole run");
  slider.type = "range";
  [slider.min, slider.max, slider.value] = [0, 15, choice.smoothing];
  slider.addEventListener("input", () => { choice.smoothing = Number(slider.value); remember(); redraw(); });
  label.append(slider);
  whole.hidden = true;
  whole.addEventListener("click", () => Object.keys(zoom).forEach(unit => zoomTo(unit, null)));
  const thin = data.steps_per_point > 1 ? ` Each point is the mean of up to ${data.steps_per_point} steps.` : "";
  const hint = "Thin: each step; thick: averaged. Drag over a plot to zoom, double-click to see all.";
  tools.append(label, whole, make("span", "", hint + thin));
  tools.hidden = !(data.plots || []).length;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { spec = ""; drawPlots(); });

  // ---------------- the live page

  const merge = reply => {
    const {columns, ...rest} = reply;
    if (reply.whole) data.columns = columns;
    else
      for (const [key, [steps, values]] of Object.entries(columns)) {
        const [knownSteps, knownValues] = data.columns[key] ||= [[], []];
        steps.forEach((step, at) => {
          let place = knownSteps.length;
          while (place && knownSteps[place - 1] >= step) place--;
          const known = knownSteps[place] === step ? 1 : 0;
          knownSteps.splice(place, known, step);
          knownValues.splice(place, known, values[at]);
        });
      }
    Object.assign(data, rest);
  };
  const ask = async path => {
    const reply = await fetch(path, {cache: "no-store"});
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  };
  let samplesAt = data.samples_bytes, samplesRead = Date.now();
  const poll = async () => {
    try {
      if (!document.hidden) {
        const reply = await ask(`/data?mark=${encodeURIComponent(data.mark)}`), changed = reply.mark !== data.mark;
        if (changed) {
          merge(reply);
          drawCards();
          drawTables();
          tools.hidden = !data.plots.length;
          drawPlots();
        }
        data.state = reply.state;
        drawState();
        if (reply.samples_bytes !== samplesAt && Date.now() - samplesRead >= SAMPLES_MS) {
          [samplesAt, samplesRead] = [reply.samples_bytes, Date.now()];
          headrace.showSamples(await ask("/samples"));
        }
      }
    } catch (error) {
      drawState(`No answer from headrace watch: ${error.message}.`);
    }
    setTimeout(poll, POLL_MS);
  };

  const start = () => {
    drawState();
    drawCards();
    drawTables();
    drawPlots();
    if (data.live) setTimeout(poll, POLL_MS);
    // The run rebuilds the report of an unfinished run now and then.
    if (data.reload_s) setInterval(() => { if (!document.hidden) location.reload(); }, 1000 * data.reload_s);
  };
  return {make, start};
})();
headrace.start();
