# SPDX-License-Identifier: Apache-2.0
"""The drawings of docs/guide/how-it-works.md: `python tools/pictures.py` writes docs/pictures/*.svg.

Each is a white card, so that it reads on a light page and on a dark one. The one that shows numbers computes them here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

TO = Path(__file__).resolve().parent.parent / "docs" / "pictures"
INK, SOFT, LINE = "#1f2933", "#5f6c7b", "#9aa5b1"
BLUE, GREEN, ORANGE, RED, GREY = "#cfe3f7", "#d3efd9", "#fbe3c0", "#f7d0d0", "#eceff3"
EDGE = {BLUE: "#2f6fb0", GREEN: "#2e8b4f", ORANGE: "#b8741a", RED: "#b23b3b", GREY: "#9aa5b1"}
LONGEST_WARM_UP = 4  # chunks; MAX_WARM_UP of the Hopper kernels


class Card:
    """An SVG under construction, in units of pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title, self.parts = width, height, title, []

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = GREY, size: int = 13) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" stroke="{EDGE[fill]}"/>')
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + (i - (len(lines) - 1) / 2) * (size + 3) + size * 0.35, line, size=size)

    def text(
        self, x: float, y: float, words: str, size: int = 13, anchor: str = "middle", ink: str = INK, bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{ink}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{INK}" stroke-width="1.4"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], ink: str = LINE, width: float = 1.0, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{places}" fill="none" stroke="{ink}" stroke-width="{width:g}"{dash}/>')

    def triangle(self, x: float, y: float, side: float, text: str, fill: str, strict: bool = False) -> None:
        """A lower triangular matrix; a strict one has an empty diagonal."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" fill="#fff" stroke="{EDGE[fill]}"/>')
        low = side * 0.14 if strict else 0
        corners = f"{x:g},{y + low:g} {x:g},{y + side:g} {x + side - low:g},{y + side:g}"
        self.parts.append(f'<polygon points="{corners}" fill="{fill}" stroke="{EDGE[fill]}"/>')
        self.text(x + side * 0.33, y + side * 0.78, text)

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" font-family="Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#fff"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def token() -> Card:
    """What one token does to the state."""
    card = Card(720, 190, "One token: the state decays, is corrected for the token's key, and is read with its query")
    steps = (
        (20, 80, "S", "the state [V, K]", BLUE),
        (210, 150, "S diag(e^g)", "forget", ORANGE),
        (420, 150, "+ b (v - S k) k^T", "write", GREEN),
        (620, 80, "o = S q", "read", GREY),
    )
    for x, width, name, what, fill in steps:
        card.box(x, 60, width, 70, name, fill)
        card.text(x + width / 2, 150, what, ink=SOFT)
    for x0, x1 in ((100, 208), (360, 418), (570, 618)):
        card.arrow(x0, 95, x1, 95)
    for x, names in ((285, "g: a decay for each channel"), (495, "k, v, b"), (660, "q")):
        card.text(x, 30, names)
        card.arrow(x, 38, x, 58)
    card.text(360, 180, "the new state goes on to the next token", ink=SOFT)
    return card


def chunks() -> Card:
    """Intra-chunk parts at once, then the recurrence."""
    card = Card(750, 300, "Chunks: what needs no state is made for all chunks at once, then a short recurrence carries the state")
    card.text(20, 28, "tokens", anchor="start", ink=SOFT)
    for i in range(64):
        card.box(100 + i * 9.2 + (i // 16) * 4, 16, 8, 16, fill=GREY)
    card.text(20, 98, "intra-chunk", anchor="start", ink=SOFT)
    card.text(20, 114, "all at once", anchor="start", ink=SOFT, size=11)
    card.text(20, 208, "recurrence", anchor="start", ink=SOFT)
    card.text(20, 224, "one after another", anchor="start", ink=SOFT, size=11)
    for i in range(4):
        x = 100 + i * 151.2
        card.arrow(x + 70, 36, x + 70, 68)
        card.box(x, 70, 140, 60, f"chunk {i + 1}\nkb, qg, kr, T, P", ORANGE)
        card.arrow(x + 70, 130, x + 70, 178)
        card.box(x + 14, 180, 112, 50, "U, o, new S", GREEN)
        card.arrow(x + 70, 230, x + 70, 262)
        card.text(x + 70, 280, "o")
        card.arrow(x + 126, 205, x + 163, 205)
    card.arrow(88, 205, 112, 205)
    card.text(728, 209, "S")
    return card


def matrices() -> Card:
    """The three products of a chunk."""
    card = Card(720, 330, "A chunk as matrices: solve for the updates U, read the outputs, carry the state")
    card.text(20, 30, "1. what the tokens of a chunk write, after what they know of each other", anchor="start", bold=True)
    card.box(20, 50, 40, 70, "U", GREEN)
    card.text(78, 90, "=")
    card.triangle(95, 50, 70, "T", ORANGE)
    card.text(183, 90, "(")
    card.box(195, 50, 40, 70, "b v", GREY)
    card.text(250, 90, "-")
    card.box(265, 50, 60, 70, "kb", ORANGE)
    card.box(335, 60, 50, 50, "S", BLUE)
    card.text(400, 90, ")")
    card.text(430, 70, "T = (I + A)^-1, A strictly lower:", anchor="start", ink=SOFT)
    card.text(430, 90, "A[t, i] = b_t k_t . e^(G_t - G_i) k_i", anchor="start", ink=SOFT)
    card.text(20, 155, "2. what they read: of the state, and of each other", anchor="start", bold=True)
    card.box(20, 170, 40, 70, "o", GREEN)
    card.text(78, 210, "=")
    card.box(95, 170, 60, 70, "qg", ORANGE)
    card.box(165, 180, 50, 50, "S", BLUE)
    card.text(233, 210, "+")
    card.triangle(250, 170, 70, "P", ORANGE)
    card.box(330, 170, 40, 70, "U", GREEN)
    card.text(430, 205, "P[t, i] = q_t . e^(G_t - G_i) k_i, i <= t", anchor="start", ink=SOFT)
    card.text(20, 272, "3. the state after the chunk", anchor="start", bold=True)
    card.text(20, 305, "S  <-  e^(G_C) S + kr^T U", anchor="start", size=15)
    card.text(430, 295, "kb = b k e^G,  qg = q e^G,  kr = k e^(G_C - G)", anchor="start", ink=SOFT, size=12)
    card.text(430, 313, "G: log decays summed from the chunk's start", anchor="start", ink=SOFT, size=12)
    return card


def transition() -> Card:
    """Runs of tokens are affine maps, and maps compose."""
    card = Card(720, 200, "A run of tokens acts on a state as an affine map, and two runs as one")
    for x, name in ((20, "S0"), (300, "S1"), (620, "S2")):
        card.box(x, 50, 80, 50, name, BLUE)
    for x, label in ((110, "tokens 1 .. n"), (400, "tokens n + 1 .. m")):
        card.box(
            x + 10, 45, 150 if x == 110 else 180, 60, f"{label}\nS M{1 if x == 110 else 2} + B{1 if x == 110 else 2}", ORANGE
        )
    for x0, x1 in ((100, 118), (270, 298), (380, 408), (590, 618)):
        card.arrow(x0, 75, x1, 75)
    card.line([(60, 104), (60, 150), (230, 150)])
    card.box(230, 128, 270, 44, "S0 (M1 M2) + (B1 M2 + B2)", GREEN)
    card.line([(500, 150), (660, 150)])
    card.arrow(660, 150, 660, 104)
    card.text(360, 28, "M, [K, K]: what is left of a state;  B, [V, K]: what was written on the way", ink=SOFT)
    card.text(360, 190, "a chunk, a segment of a sequence, the tokens of a rank: the same map", ink=SOFT)
    return card


def segments() -> Card:
    """One sequence on several multiprocessors, in two ways."""
    card = Card(720, 330, "Segments: warm-up where gates forget, chained transitions where they do not")
    card.text(20, 24, "one long sequence in four segments, on four multiprocessors at once", anchor="start", bold=True)
    card.text(
        20, 52, "warm-up: the chunks in front provably forget all before them, so start there from zero", anchor="start", ink=SOFT
    )
    for i in range(4):
        y = 64 + i * 24
        card.text(80, y + 14, f"SM {i}", anchor="end", size=12)
        if i:
            card.box(90, y, 40, 18, "", RED)
        card.box(130 if i else 90, y, 130, 18, f"segment {i}", GREEN, size=11)
    card.arrow(90, 172, 330, 172)
    card.text(338, 176, "time", anchor="start", ink=SOFT, size=12)
    card.box(430, 72, 40, 18, "", RED)
    card.text(480, 86, "chunks run without output", anchor="start", size=12)
    card.box(430, 98, 40, 18, "", ORANGE)
    card.text(480, 112, "the transition (M, B) of a segment", anchor="start", size=12)
    card.box(430, 124, 40, 18, "", GREEN)
    card.text(480, 138, "chunks with output", anchor="start", size=12)
    card.text(20, 206, "chained: exact for any gate, with more work", anchor="start", ink=SOFT)
    for i in range(4):
        y = 218 + i * 24
        card.text(80, y + 14, f"SM {i}", anchor="end", size=12)
        card.box(90, y, 130, 18, f"segment {i}", GREEN if not i else ORANGE, size=11)
        if i:
            start = 250 + i * 28
            card.line([(220, y + 9), (start, y + 9)], dashed=True)
            card.box(start, y, 130, 18, f"segment {i}", GREEN, size=11)
            card.arrow(start - 14, y - 12, start - 2, y + 6)
    card.line([(220, 227), (264, 227), (264, 230)], ink=INK, width=1.4)
    card.text(500, 260, "a state is handed on: S M + B", anchor="start", ink=SOFT, size=12)
    return card


def forgetting() -> Card:
    """How much of a state is left after some chunks, for several gates."""
    card = Card(720, 330, "How much of a state outlives chunks of 64 tokens, for several decays a token")
    left, top, width, height, most = 80, 40, 430, 230, 30.0
    for power in range(0, 31, 6):
        y = top + height * power / most
        card.line([(left, y), (left + width, y)], ink="#e3e7ec")
        card.text(left - 8, y + 4, f"2^-{power}" if power else "1", anchor="end", size=12)
    for chunk in range(7):
        card.text(left + width * chunk / 6, top + height + 20, str(chunk), size=12)
    card.text(left + width / 2, top + height + 42, "chunks of 64 tokens", ink=SOFT)
    card.text(left, 22, "what is left of a state, with one gate a head", anchor="start", ink=SOFT)
    for i, (decay, ink) in enumerate(((0.3, "#b23b3b"), (0.1, "#b8741a"), (0.03, "#2e8b4f"), (0.005, "#2f6fb0"))):
        bits_a_chunk = 64 * decay / math.log(2)
        end = min(6.0, most / bits_a_chunk)
        card.line([(left, top), (left + width * end / 6, top + height * bits_a_chunk * end / most)], ink=ink, width=2.2)
        needed = math.ceil(24 / bits_a_chunk)
        y = top + 20 + i * 44
        card.line([(530, y - 4), (552, y - 4)], ink=ink, width=2.2)
        card.text(560, y, f"e^-{decay:g} a token", anchor="start", size=12)
        how = "warm-up" if needed <= LONGEST_WARM_UP else "chained"
        card.text(560, y + 16, f"{needed} chunk{'s' if needed > 1 else ''}: {how}", anchor="start", size=12, ink=SOFT)
    y = top + height * 24 / most
    card.line([(left, y), (left + width, y)], ink=INK, dashed=True, width=1.4)
    card.text(left + width + 8, y + 4, "2^-24: forgotten", anchor="start", size=12)
    x = left + width * LONGEST_WARM_UP / 6
    card.line([(x, top), (x, top + height)], ink=INK, dashed=True)
    card.text(x + 6, top + height - 6, "longest warm-up", anchor="start", size=11, ink=SOFT)
    return card


PICTURES: tuple[Callable[[], Card], ...] = (token, chunks, matrices, transition, segments, forgetting)


def main() -> None:
    TO.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        (TO / f"{draw.__name__}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
