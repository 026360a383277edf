"""The algorithm lab: find a better cuBLASLt algorithm for a shape, prove it, pin it, undo it.

candidates   which algorithms to try: the heuristic's answers, their neighbours, the whole range
worker       the child process that cuBLASLt may kill; torch-free until it is asked to time
measure      operands, comparison by bytes and timing, inside that child
children     the parent's side: a crash or a hang of the child is an answer, not an end
verdict      medians, noise, and what "faster by more than the noise" means
judgement    who wins a sweep: byte-exact, faster at one clock and once the GPU has settled
sweep        the three together, with a result file that can be resumed
report       Markdown and plot of a result
gate         sweep → block → trajectory, the ladder a candidate climbs before it is promoted
commands     ``python -m nvfp4_linear sweep`` and ``gate``
"""
