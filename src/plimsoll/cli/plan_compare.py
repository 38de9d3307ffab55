"""`plimsoll plan --compare FILE`: one command a line, planned side by side; a line may name a card of its own."""

from __future__ import annotations

from plimsoll.cli.options import Split, split_options
from plimsoll.cli.output import show
from plimsoll.cli.plan import card_of, planned_launch
from plimsoll.errors import BadInput, PlimsollError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.domain.launch import Launch

OF_A_LINE = ("--gpu", "--gpus", "--gpu-memory-gib", "--used-gib", "--vllm")
"""What may stand in front of a line's `vllm serve`."""
_NAMES_A_CARD = frozenset({"--gpu", "--gpu-memory-gib"})
_OF_A_CARD = _NAMES_A_CARD | {"--used-gib"}


def compare(options: Split) -> int:
    """Plan every start in the file; one that cannot be planned says why in its place."""
    from plimsoll.report import plan_compare
    from plimsoll.sources.launches import read_list

    path = options.values["--compare"]
    beside = (*options.rest, *(options.verbatim or ()))
    if beside:
        raise BadInput(f"--compare {path} names the file that holds the commands; {beside[0]!r} stands beside it")
    launches, notes = read_list(path)
    if not all(_NAMES_A_CARD & _names(launch) for launch in launches):
        card_of(options)  # a card that is missing or unknown is said once, not for each line
    found = []
    for launch in launches:
        try:
            planned = planned_launch(_of_line(options, launch), launch, "", learned=True)
            found.append(plan_compare.Compared(launch.source, planned))
        except PlimsollError as error:
            found.append(plan_compare.Compared(launch.source, None, str(error)))
    as_shown = plan_compare.as_json if "--json" in options.switches else plan_compare.as_text
    show(as_shown(found, notes))
    return 0 if all(one.planned is not None and one.planned.fits for one in found) else 1


def _names(launch: Launch) -> set[str]:
    return {word.partition("=")[0] for word in launch.in_front}


def _of_line(options: Split, launch: Launch) -> Split:
    """The options for one line: its own go before those that were typed; a card of its own has neighbours of its own."""
    own = split_options(launch.in_front, with_value=OF_A_LINE, switches=())
    if own.rest or own.verbatim is not None:
        raise BadInput(f"`{' '.join(launch.in_front)}`: in front of a command only {', '.join(OF_A_LINE)} can stand")
    other_card = bool(own.values.keys() & _NAMES_A_CARD)
    typed = {name: value for name, value in options.values.items() if not (other_card and name in _OF_A_CARD)}
    return options._replace(values={**typed, **own.values})
