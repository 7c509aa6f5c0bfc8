// Standard input: [[tex, is it displayed?], ...] as JSON. Standard output: the HTML of each.
const katex = require("katex");

const formulas = JSON.parse(require("fs").readFileSync(0, "utf8"));
const html = formulas.map(([tex, displayMode]) =>
  katex.renderToString(tex, { displayMode, throwOnError: true, strict: "error" }),
);
process.stdout.write(JSON.stringify(html));
