"""The report's HTML page, a string.Template: layout and colours, light and dark."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title - headrace</title>
<style>
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  --page: #f5f6f8; --card: #ffffff; --line: #e1e4e9; --text: #1b1f27; --ink: #5d6675; --grid: #e3e6eb;
  --blue: #2e6bd6; --orange: #d97a0b; --green: #2a9162; --red: #cc3f4d; --purple: #8452c8; --grey: #a3abb8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1b1f28; --line: #2c323e; --text: #e8ebf0; --ink: #9aa4b4; --grid: #2c323e;
    --blue: #74a5ff; --orange: #f2a04a; --green: #56c596; --red: #f27d88; --purple: #b48cf2; --grey: #6d7687;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 var(--font); }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; margin-bottom: 20px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 6px; }
header span { color: var(--ink); }
header .state { font-size: 13px; padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; }
.good { color: var(--green) !important; }
.open { color: var(--orange) !important; }
.cards { display: grid; gap: 14px; margin-bottom: 14px;
  grid-template-columns: repeat(auto-fill, minmax(max(160px, calc((100% - 42px) / 4)), 1fr)); }
.card, figure, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 12px 16px; display: flex; flex-direction: column; }
.card span { color: var(--ink); font-size: 13px; }
.card b { font-size: 24px; line-height: 1.35; font-variant-numeric: tabular-nums; }
.card small { color: var(--ink); font-size: 12px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 16px 18px 12px; min-width: 0; display: flex; flex-direction: column; }
figure.wide { grid-column: 1 / -1; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 6px; padding: 0; }
figure li { color: var(--ink); font-size: 13px; }
figure li::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; background: var(--c); }
figure svg { display: block; width: 100%; height: auto; margin-top: auto; }
figure p { color: var(--ink); font-size: 12px; margin: 4px 0 0; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px;
  margin-top: 14px; align-items: start; }
section { padding: 16px 18px; overflow-x: auto; max-height: 460px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--ink); font-weight: 500; white-space: nowrap; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--ink); font-size: 13px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
  overflow-x: auto; }
</style>
</head>
<body>
<main>
<header><h1>$title</h1><span class="state $state_class">$state</span></header>
<div class="cards">$cards</div>
<div class="plots">$plots</div>
<div class="tables">$validations$settings$phases</div>
<details><summary>config.yaml</summary><pre>$config</pre></details>
</main>
</body>
</html>
"""
