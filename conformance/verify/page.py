"""The certificate as one page, which needs nothing beside itself."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from conformance.verify.certificate import PARTIAL, PASSED, excepted
from conformance.verify.summary import by_family, headline
from conformance.verify.texts import must

__all__ = ["page"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvspec: {title}</title>
<style>
:root {{ color-scheme: light dark; --pass: #1a7f37; --fail: #cf222e; --other: #9a6700; --dim: #767676; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --pass: #3fb950; --fail: #ff7b72; --other: #d29922; --dim: #9a9a9a; }} }}
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 2.4rem; line-height: 1.2; margin: 0; }} h1::first-letter {{ text-transform: uppercase; }}
h1 + p {{ font-size: 1.1rem; margin-top: .3rem; }} h1 + p, code {{ overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }} .facts td {{ overflow-wrap: anywhere; min-width: 4rem; }}
table {{ border-collapse: collapse; width: 100%; }} th, td {{ text-align: left; padding: .1rem .8rem .1rem 0; }}
td {{ border-top: 1px solid color-mix(in srgb, currentColor 15%, transparent); }}
.pass {{ color: var(--pass); }} .fail {{ color: var(--fail); }} .excepted {{ color: var(--other); }}
.dim {{ color: var(--dim); }} .number {{ text-align: right; }}
pre {{ overflow-x: auto; padding: .6rem; background: color-mix(in srgb, currentColor 8%, transparent); }}
</style></head><body>
<h1 class="{verdict}">{word}</h1><p>{title}</p>
{body}
</body></html>
"""


def page(made: Mapping[str, Any]) -> str:
    """The page of a certificate."""
    verdict = "pass" if made["verdict"] in PASSED else "excepted" if made["verdict"] == PARTIAL else "fail"
    parts = [*_facts(made), *_counterexamples(made), *_families(made), *_vectors(made), *_exceptions(made)]
    return _PAGE.format(
        title=escape(headline(made)), word=escape(made["verdict"]), verdict=verdict, body="\n".join(parts),
    )


def _row(*cells: object) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _facts(made: Mapping[str, Any]) -> Iterator[str]:
    named = {"verdict": "verdict", "judged": "judged by", "date": "date", "kvspec": "kvspec", "spec": "specification"}
    rows = {title: made[name] for name, title in named.items()}
    yield '<table class="facts">'
    yield from (_row(name, escape(str(value))) for name, value in rows.items())
    for name in ("subject", "run", "device", "counts"):
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in made[name].items())
        yield _row(name, escape(facts))
    yield "</table>"
    option = f"--{made['subject']['kind']}"
    yield "<p>To repeat all of it: <code>kvspec verify --check certificate.toml</code>; the subject was named with"
    yield f"<code>{option} {escape(made['subject']['named'])}</code>.</p>"


def _counterexamples(made: Mapping[str, Any]) -> Iterator[str]:
    for item in made["failing"]:
        row = made["items"][item]
        yield f'<h2 id="{item}" class="fail">{item}</h2><p>MUST {escape(must(item, row))}</p>'
        yield "<pre>" + escape("\n".join(filter(None, (row["input"], row["found"])))) + "</pre>"
        yield f"<p>To repeat it: <code>{escape(row['repeat'])}</code></p>"


def _families(made: Mapping[str, Any]) -> Iterator[str]:
    for family, items in by_family(made).items():
        if not items:
            yield f"<h2>{family}: not offered</h2>"
            continue
        yield f'<h2>{family}</h2><div class="wide"><table>'
        yield "<tr><th>item<th>verdict<th>tests passed<th>examples<th>rule</tr>"
        for item, row in items.items():
            name = f'<a href="#{item}">{item}</a>' if row["verdict"] == "fail" else item
            word = f'<span class="{row["verdict"].replace(" ", "-")}">{row["verdict"]}</span>'
            text = f'<span class="dim">{escape(must(item))}</span>'
            yield _row(name, word, f"{row['passed']} of {row['tests']}", row["examples"], text)
        yield "</table></div>"


def _vectors(made: Mapping[str, Any]) -> Iterator[str]:
    if made["vectors"]:
        yield "<h2>vectors</h2>"
    yield '<table class="facts">'
    for verdict in dict.fromkeys(made["vectors"].values()):
        named = [name for name, said in made["vectors"].items() if said == verdict]
        yield _row(verdict, len(named), f'<span class="dim">{escape(", ".join(named))}</span>')
    yield "</table>"


def _exceptions(made: Mapping[str, Any]) -> Iterator[str]:
    if made["exception"]:
        yield '<h2>exceptions</h2><div class="wide"><table>'
        for entry in made["exception"]:
            subject = excepted(entry)
            unneeded = "no longer needed" if subject in made["unneeded_exceptions"] else ""
            cells = (subject, entry["kind"], entry["reason"], entry["issue"], entry["expiry"], unneeded)
            yield _row(*(escape(str(cell)) for cell in cells))
        yield "</table></div>"
