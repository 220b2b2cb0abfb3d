"""Small steps that tests manage: one module for each kind of construct."""

from tests.programs import branches, libraries, loops, rules, straight

EXAMPLES = [
    *loops.EXAMPLES,
    *branches.EXAMPLES,
    *rules.EXAMPLES,
    *straight.EXAMPLES,
    *libraries.EXAMPLES,
]
