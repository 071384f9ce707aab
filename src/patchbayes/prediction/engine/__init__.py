"""The fast path of prediction: capture the network once as a graph, then do every piece of work once.

The nouns of this package, in the order in which a prediction meets them:

    capture      the network's operations as one graph (`torch.export`), in which its parameters, its buffers, what was drawn
                 for its sites, and the arguments of the call are inputs. It holds no values: these are read when it is run.
    site         a patched module. What is drawn for it, its *drawn tensors*, enters the graph as inputs of its own.
    dependence   the sites that an operation can be reached from in the graph.
    class        draws that give a site, or a set of sites, the same value are one class of it: computed once.
    stage        the operations whose sites tell the same draws apart, as one callable. Stages form a chain from "no site"
                 to "every draw by itself"; a stage is run once for each of its classes. Neighbors with so little to do that
                 sharing costs more than it saves are one stage.
    block        the outputs of a stage for several of its classes: stacked in front (run together by `torch.vmap`) or a
                 list of them (run one after the other).
    itinerary    the distinct results in the order in which they are computed, so that neighbors share as much as can be, and
                 for every stage the class of each.
    chunk        results computed together. Its size follows from counts (bytes and operations), never from a stopwatch.
    route        stages and sizes of chunks for some draws and batches of one size.
    realization  the weights of a draw. They are made once for all batches of a prediction, within the memory limit.
"""

from .engine import Engine

__all__ = ["Engine"]
