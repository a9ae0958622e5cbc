// Uses the page of results as a reader does: each step sets a width or unticks a policy, and says what is then shown.
function drive(steps) {
  return steps.map(({ width = 0, untick = -1 }) => {
    if (width) document.body.style.width = `${width}px`;
    if (untick >= 0) document.querySelectorAll(".legend input")[untick].click();
    const right = document.body.getBoundingClientRect().right;
    const all = [...document.querySelectorAll("main *")].filter((part) => !part.closest(".wide *, svg *"));
    return {
      wider: all.filter((part) => part.getBoundingClientRect().right > right + 1).map((part) => part.outerHTML.slice(0, 99)),
      curves: [...document.querySelectorAll(".panel .curve")].filter((part) => getComputedStyle(part).display !== "none").length,
    };
  });
}
