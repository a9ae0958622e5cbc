// `node stages.mjs STAGES < cases`: what the page's `prefill` makes of each case, a record with tokens and parameters.
import { readFileSync } from "node:fs";

const { prefill } = await import(process.argv[2]);
const cases = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(cases.map((given) => prefill(given, given.tokens, given.parameters))));
