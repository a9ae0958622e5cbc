// Uses the page as a reader does: each step sets controls or presses a key, and says what the page then shows.
function drive(steps) {
  const part = (id) => document.getElementById(id);
  const change = (id, value) => {
    part(id).value = String(value);
    part(id).dispatchEvent(new Event(id === "measure" || part(id).tagName === "SELECT" ? "change" : "input"));
  };
  const press = (keys) => {
    const key = { key: keys.replace("Shift+", ""), shiftKey: keys.startsWith("Shift+") };
    part("text").dispatchEvent(Object.assign(new Event("keydown", { cancelable: true }), key));
  };
  const trunks = () => [...part("text").children];
  return steps.map(({ set = {}, keys = [] }) => {
    for (const [id, value] of Object.entries(set)) change(id, value);
    keys.forEach(press);
    const tokens = trunks().flatMap((trunk) => [...trunk.children]);
    const lit = trunks().filter((trunk) => trunk.getAttribute("aria-selected") === "true");
    return {
      kept: tokens.filter((token) => !token.getAttribute("class").split(" ").includes("gone"))
        .map((token) => Number(token.getAttribute("data-i"))),
      text: tokens.map((token) => token.textContent).join(""),
      fates: trunks().map((trunk) => trunk.getAttribute("class").split(" ")[1]),
      chosen: lit.map((trunk) => trunk.getAttribute("id")),
      token: tokens.filter((token) => token.getAttribute("class").split(" ").includes("chosen"))
        .map((token) => token.getAttribute("id")),
      summary: part("summary").textContent,
      beside: part("beside").textContent,
      details: part("details").textContent,
      check: part("check").textContent,
      bars: [...part("line").children].filter((bar) => bar.getAttribute("class") === "hit").length,
      arcs: [...part("graph").children].filter((arc) => arc.getAttribute("class") === "link").length,
    };
  });
}
