"""The driver: what lies between a caller's arrays and the blocks that a backend computes.

Every mode is an answer to *which keys does a query read by the map*: the keys before a first
border, and those from a second one on (`stops`); what lies between is exact, pair by pair. A
module imports only some of those below it::

    backward                gradients of a problem             forward: a problem, solved
      pair_vjps             exact pairs, pulled back           traced: loops that JAX compiles
      linear_vjps           lines, pulled back
        gradient_rows       where gradients go, checkpoints    packed: sequences as problems
          runner            lines, pairs, or both, a task
            window          near pairs, far keys by lines
            short_runs      many short lines, one block        sinks: exact first keys
            clusters        chosen clusters                    softmax: runs of keys
              lines         one state, and who reads it        problem: checked and described
              causal_blocks accepted or redone                 pairs: what a query block reads
              steps         keys and queries in one order      stamps: what a state is of
              stops         which keys a query reads           weights: what keys weigh
              blocks        tasks, tokens in, rows out         options: what is asked, and seen
                specs       peeled, or with one more axis
"""
