"""Bars, tables and shards as HTML, in the colours of the project's other figures."""

from html import escape

from common.train import show_bytes

STATES = ("parameters", "gradients", "optimizer")
SAID = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}


def legend(*more):
    """The classes of model states, each with its colour; `more` are (class, words) besides."""
    items = [*((kind, SAID[kind]) for kind in STATES), *more]
    return '<ul class="legend">' + "".join(f'<li><i class="{kind}"></i>{said}</li>' for kind, said in items) + "</ul>"


def bars(rows, now=None):
    """Horizontal bars of bytes.

    Args:
        rows: [(label, {class: bytes})]; a class is one of STATES, or one of the style sheet's.
        now: the label that the slide is about; the others step back.
    """
    most = max(sum(parts.values()) for _, parts in rows)
    html = ""
    for label, parts in rows:
        kinds = "".join(
            f'<i class="{kind}" style="width:{100 * size / most:.2f}%"></i>' for kind, size in parts.items() if size
        )
        about = f' class="{"now" if label == now else "past"}"' if now else ""
        html += f'<tr{about}><th scope="row">{label}</th><td><div class="bar">{kinds}'
        html += f"<b>{show_bytes(sum(parts.values()))}</b></div></td></tr>"
    return f'<table class="bars">{html}</table>'


def table(head, rows, words=False):
    """A table; a cell is text, or (class, text). The second column may be words, which stand on the left."""
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = ""
    for first, *cells in rows:
        pairs = [cell if isinstance(cell, tuple) else ("", cell) for cell in cells]
        body += f'<tr><th scope="row">{first}</th>' + "".join(f'<td class="{c}">{t}</td>' for c, t in pairs) + "</tr>"
    kind = "numbers words" if words else "numbers"
    return f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'


def shards(sharded, ranks=4):
    """What each of some ranks keeps: a row of `ranks` cells for each class, filled where it keeps that shard."""
    columns = ""
    for rank in range(ranks):
        rows = ""
        for kind in STATES:
            kept = [kind not in sharded or shard == rank for shard in range(ranks)]
            cells = "".join(f'<i class="{kind if keeps else "away"}"></i>' for keeps in kept)
            rows += f'<div class="row">{cells}</div>'
        columns += f"<div><h3>rank {rank}</h3>{rows}</div>"
    said = ", ".join(SAID[kind] for kind in sharded) or "nothing"
    return f'<div class="shards" role="img" aria-label="{ranks} ranks; sharded: {escape(said)}">{columns}</div>'
