// `node browser.mjs CHROMIUM DRIVER`: the driver's answers in a headless Chromium, asked over its pipe.
// A line of the input is the JSON of a page's path and of its steps.
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const [binary, driver] = process.argv.slice(2);
const given = createInterface({ input: process.stdin });
const flags = ["headless", "no-sandbox", "disable-gpu", "remote-debugging-pipe"];
const pipes = ["ignore", "ignore", "ignore", "pipe", "pipe"];
const browser = spawn(binary, flags.map((flag) => `--${flag}`), { stdio: pipes });
const waiting = new Map();
let [asked, rest] = [0, ""];

browser.stdio[4].on("data", (bytes) => {
  const messages = (rest + bytes).split("\0");
  rest = messages.pop();
  for (const { id, result, error } of messages.map((message) => JSON.parse(message))) {
    if (waiting.has(id)) waiting.get(id)(error ? { error } : result);
  }
});

function ask(method, params, sessionId) {
  asked += 1;
  const answer = new Promise((found) => waiting.set(asked, found));
  browser.stdio[3].write(`${JSON.stringify({ id: asked, method, params, sessionId })}\0`);
  return answer;
}

const loaded = 'location.protocol === "file:" && document.readyState === "complete"';
const checked = 'document.getElementById("check")?.textContent !== ""';

for await (const line of given) {
  const late = setTimeout(() => process.exit(1), 120_000);
  const [page, steps] = JSON.parse(line);
  const { targetId } = await ask("Target.createTarget", { url: `file://${page}` });
  const { sessionId } = await ask("Target.attachToTarget", { targetId, flatten: true });
  const evaluate = (expression) => ask("Runtime.evaluate", { expression }, sessionId);
  const ready = async () => (await evaluate(`${loaded} && ${checked}`)).result?.value;
  while (!(await ready())) await new Promise((later) => setTimeout(later, 20));
  const expression = `${readFileSync(driver, "utf8")}\nJSON.stringify(drive(${JSON.stringify(steps)}))`;
  const { result } = await evaluate(expression);
  console.log(result.value ?? JSON.stringify(result));
  await ask("Target.closeTarget", { targetId });
  clearTimeout(late);
}
browser.kill();
