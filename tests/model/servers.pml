/*
 * A center in parts on several servers: orders, gradients and parameters between nodes.
 * In hpcaccum/server: loop.py, orders.py, publisher.py.
 *
 * tests/system/test_model.py runs it through Spin. A configuration is a set of macros:
 *
 *   NODES       nodes, each with a server, the root on node 0, and a rank that gives
 *               gradients
 *   STEPS       the root orders steps 2 to STEPS; the servers begin with step 1
 *   SINGLE      one gradient makes a step, in turn those of the nodes; otherwise those of
 *               all nodes
 *   BUFFERS     steps that may be ordered and not made: 1; with SINGLE also 2
 *   PAIR        with SINGLE: two ranks give gradients, both on node 0
 *   READERS     ranks that wait for any step, from the last node to the first
 *   HOPE        they may wait for a step that will never come, and then give up
 *   TIMEOUTS    they may give up any wait
 *   BUG_...     one planted bug each: search for the name
 *
 * What is proven: the assertions. Those of Monitor hold in every final state: all steps
 * are made, all ranks are done, no agent waits, and no message is left. So there is no
 * deadlock.
 *
 * Not modelled: admission (accumulator.pml, updates.pml), copies of which a rank reads
 * one while the next is written (updates.pml), questions to servers, ranks that die.
 *
 * Abstractions, and why they hide no error:
 *
 * 1. A gradient, and a part of the parameters, is the number of its step. What is mixed
 *    or overwritten early differs in it. A vector is one message; the pieces of one are
 *    sent and received in the same order.
 * 2. A process is what an agent does in turn; handlers that run beside it are processes
 *    of their own. Messages between two agents keep their order, as in MPI.
 *    What a rank asks of its own agent, the root of its own, and the report of a server
 *    that a step is made, are done at once: each may happen at any time.
 * 3. A rank writes its next gradient as soon as it may, and the agent reads it as late as
 *    it may.
 * 4. Memory is sequentially consistent: see accumulator.pml.
 */

#ifndef NODES
#define NODES 2
#endif
#ifndef STEPS
#define STEPS 3
#endif
#ifndef READERS
#define READERS 1
#endif
#ifdef HOPE
#define LAST (STEPS + 1)
#else
#define LAST STEPS
#endif
#define BIT(n) (1 << (n))
#define ALL (BIT(NODES) - 1)
#ifndef BUFFERS
#define BUFFERS 1
#endif
#ifdef PAIR
#define RANKS 2
#define NODE_OF(rank) 0
#else
#define RANKS NODES
#define NODE_OF(rank) (rank)
#endif
#if READERS || defined(PAIR)
#define SEVERAL                 /* ranks of a node wait */
#endif
/* Of a step: the nodes that give gradients, and which rank of a node does. */
#ifdef SINGLE
#define GIVERS(step) BIT(NODE_OF((step) % RANKS))
#define GIVER(node, step) ((step) % RANKS)
#else
#define GIVERS(step) ALL
#define GIVER(node, step) (node)
#endif

#define HAPPENS(what) \
    c_code { static int before; if (!before++) printf("happens: %s\n", #what); }

/* Messages that a channel holds: more than there ever are, as a process that waits for
 * room could be overtaken. */
#define MOST 5

mtype = { STEP, SEND, COMING };

/* To the root's agent from that of each node: a step that it wants. */
chan report[NODES] = [MOST] of { byte };
/* From it to the agent of each node: a step and a set of nodes. */
chan node_[NODES] = [MOST] of { mtype, byte, byte };
/* Between nodes: from, to. Steps whose gradients are to be sent and received. */
chan giving[NODES * NODES] = [2] of { byte };
chan collecting[NODES * NODES] = [2] of { byte };
chan gradient[NODES * NODES] = [2] of { byte };
chan part_of[NODES * NODES] = [2] of { byte };
#define LINK(from, to) ((from) * NODES + (to))

/* The root, and its agent. */
byte NEWEST;
byte made[NODES];
byte admitted[STEPS + 1];       /* of each step: the nodes whose gradients there are */
byte ordered;
byte wants[NODES];
byte sent[NODES];

byte slot[RANKS];               /* gradients */

/* Of each node: orders in their turn, gradients that have come, the server's part. */
byte buffer[NODES * NODES * BUFFERS];
#define BUFFER(from, to, step) buffer[LINK(from, to) * BUFFERS + (step) % BUFFERS]
chan orders[NODES] = [MOST] of { mtype, byte, byte };
byte part[NODES];
/* The parameters that its ranks read: the word, and of each server the step of its part
 * in the copy that is complete. */
byte version[NODES];
byte copy[NODES * NODES];
#define COPY(node, server) copy[(node) * NODES + (server)]
/* Steps that are waited for, the one that was asked for, and steps on their way. */
byte waiting[NODES];
byte wanted[NODES];
chan coming[NODES] = [MOST] of { byte };
bit busy[NODES];                /* receives parameters */

byte done;                      /* ranks */
bit root_done;
bit stopped;

/* The root, and its agent. */

#ifndef BUG_SENT_TWICE
#define NOT_SENT(step, to) ((step) > sent[to])
#else
#define NOT_SENT(step, to) true
#endif

inline keep_later(node) {
    if
    :: wants[node] <= ordered -> wants[node] = 0
    :: else
    fi
}

inline send_now(node) {
    assert(sent[node] < ordered);
    sent[node] = ordered;
    keep_later(node);
    for (each : 0 .. NODES - 1) { node_[each]!SEND,ordered,BIT(node) }
    each = 0;
    node_[node]!COMING,ordered,0
}

proctype Root() {
    byte step, n, ready, each;

    atomic {
        NEWEST = 1;
        ordered = 1;
#ifndef BUG_BEGIN_FORGETS
        for (n : 0 .. NODES - 1) {
            if
            :: wants[n] == 1 ->
               HAPPENS(a want that comes before the root begins);
               send_now(n)
            :: else
            fi
        }
#endif
        n = 0
    };
    for (step : 2 .. STEPS) {
#ifndef BUG_BUFFER_REUSED
        for (n : 0 .. NODES - 1) { made[n] + BUFFERS >= step }
#endif
        atomic {
            admitted[step] == GIVERS(step) ->
#if BUFFERS > 1
            if
            :: made[0] + 1 < step -> HAPPENS(a step that is ordered ahead)
            :: else
            fi;
#endif
            NEWEST = step;
            ordered = step;
            for (n : 0 .. NODES - 1) {
                if
                :: wants[n] && wants[n] <= step -> ready = ready | BIT(n)
                :: else
                fi
            }
#ifndef SINGLE
            ready = ready | GIVERS(step);
#endif
            for (n : 0 .. NODES - 1) {
                if
                :: ready & BIT(n) ->
                   assert(sent[n] < step);
                   sent[n] = step;
                   keep_later(n)
                :: else
                fi
            }
            for (n : 0 .. NODES - 1) { node_[n]!STEP,step,ready }
            n = 0; ready = 0
        }
    }
    for (n : 0 .. NODES - 1) { made[n] >= STEPS }
    root_done = 1
}

proctype Reports(byte from) {
    byte step, each;

end:
    do
    :: atomic {
        report[from]?step ->
        if
#ifdef SEVERAL
        :: !NOT_SENT(step, from) -> HAPPENS(a want for what is on its way)
#endif
        :: NOT_SENT(step, from) && step <= ordered ->
#ifndef BUG_WANT_FORGOTTEN
           HAPPENS(a want that comes after the order);
           send_now(from)
#else
           skip
#endif
        :: step > ordered -> wants[from] = step
        fi;
        step = 0
       }
    :: stopped -> break
    od
}

/* The agent of a node: what it does at once. */

#ifndef BUG_LATER_FIRST
#define EARLIER(step, other) ((step) < (other))
#else
#define EARLIER(step, other) false
#endif

inline want(node) {
    least = 1;
    do
    :: least <= LAST && !(waiting[node] & BIT(least)) -> least++
    :: else -> break
    od;
    if
    :: least <= LAST && (!wanted[node] || EARLIER(least, wanted[node])) ->
       wanted[node] = least;
       report[node]!least
    :: else
    fi;
    assert(least > LAST || wanted[node] <= least);
    least = 0
}

proctype Agent(byte node) {
    byte step, nodes, to;

end:
    do
    :: atomic {
        node_[node]?STEP,step,nodes ->
        if
        :: GIVERS(step) & BIT(node) ->
           for (to : 0 .. NODES - 1) {
               if
#ifndef BUG_GIVE_TOGETHER
               :: to != node -> giving[LINK(node, to)]!step
#else
               :: to != node -> run Give(node, to, step)
#endif
               :: else
               fi
           }
        :: else
        fi;
        for (to : 0 .. NODES - 1) {
            if
#ifndef BUG_COLLECT_TOGETHER
            :: to != node && (GIVERS(step) & BIT(to)) -> collecting[LINK(to, node)]!step
#else
            :: to != node && (GIVERS(step) & BIT(to)) -> run Collect(to, node, step)
#endif
            :: else
            fi
        };
        orders[node]!STEP,step,nodes;
        if
        :: nodes & BIT(node) -> coming[node]!step
        :: else
        fi;
        step = 0; nodes = 0; to = 0
       }
    :: atomic {
        node_[node]?SEND,step,nodes -> orders[node]!SEND,step,nodes; step = 0; nodes = 0
       }
    :: atomic {
        node_[node]?COMING,step,nodes -> coming[node]!step; step = 0; nodes = 0
       }
    :: stopped -> break
    od
}

/* What runs beside it: gradients on their way to a server. */

inline give(node, to, step) {
    gradient[LINK(node, to)]!slot[GIVER(node, step)]
}

inline collect(from, to, step) {
    gradient[LINK(from, to)]?value;
    assert(value == step);
    assert(!BUFFER(from, to, step));
    BUFFER(from, to, step) = value;
    value = 0
}

#ifndef BUG_GIVE_TOGETHER
proctype Giving(byte node, to) {
    byte step;

end:
    do
    :: atomic { giving[LINK(node, to)]?step -> give(node, to, step); step = 0 }
    :: stopped -> break
    od
}
#else
proctype Give(byte node, to, step) {
    atomic { give(node, to, step) }
}
#endif

#ifndef BUG_COLLECT_TOGETHER
proctype Collecting(byte from, to) {
    byte step, value;

end:
    do
    :: atomic {
        nempty(collecting[LINK(from, to)]) && nempty(gradient[LINK(from, to)]) ->
        collecting[LINK(from, to)]?step;
        collect(from, to, step);
        step = 0
       }
    :: stopped -> break
    od
}
#else
proctype Collect(byte from, to, step) {
    byte value;

    atomic { collect(from, to, step) }
}
#endif

/* Orders in their turn, with the server. */

proctype Server(byte node) {
    byte step, nodes, n;
    mtype kind;

end:
    do
    :: atomic { orders[node]?kind,step,nodes ->
        if
        :: kind == STEP -> n = 0
        :: else -> n = NODES
        fi
       };
       do
       :: n < NODES && (n == node || !(GIVERS(step) & BIT(n))) -> n++
       :: atomic {
           n < NODES && n != node && (GIVERS(step) & BIT(n)) ->
           BUFFER(n, node, step) == step ->
           BUFFER(n, node, step) = 0;
           n++
          }
       :: n == NODES -> break
       od;
       if
       :: kind == STEP && (GIVERS(step) & BIT(node)) ->
          assert(slot[GIVER(node, step)] == step)
       :: else
       fi;
       if
       :: kind == STEP -> part[node] = step
       :: else -> assert(part[node] == step)
       fi;
       atomic {
           for (n : 0 .. NODES - 1) {
               if
               :: nodes & BIT(n) ->
#ifndef BUG_NO_SNAPSHOT
                  part_of[LINK(node, n)]!part[node]
#else
                  run Late(node, n)
#endif
               :: else
               fi
           };
           if
           :: kind == STEP -> made[node] = step
           :: else
           fi;
           step = 0; nodes = 0; n = 0; kind = 0
       }
    :: stopped -> break
    od
}

#ifdef BUG_NO_SNAPSHOT
proctype Late(byte node, to) {
    part_of[LINK(node, to)]!part[node]
}
#endif

/* Parameters that come to a node. */

proctype Receive(byte node) {
    byte step, n, value, least;

end:
    do
    :: atomic { coming[node]?step -> busy[node] = 1 };
       for (n : 0 .. NODES - 1) {
           atomic {
               part_of[LINK(n, node)]?value ->
               assert(value == step);
               value = 0
#ifdef BUG_COMPLETE_EARLY
               ; version[node] = step
#endif
           }
       }
       atomic {
#ifndef BUG_COMPLETE_EARLY
           assert(step > version[node]);
#endif
           for (n : 0 .. NODES - 1) { COPY(node, n) = step }
           version[node] = step;
           waiting[node] = waiting[node] & ~(BIT(step + 1) - 1);
           wanted[node] = 0;
#if defined(SEVERAL) && !defined(BUG_NOT_ASKED_AGAIN)
           want(node);
#endif
           busy[node] = 0; step = 0; n = 0
       }
    :: stopped -> break
    od
}

/* Ranks. */

inline fetch(node, step) {
    atomic {
        if
        :: version[node] < step ->
           waiting[node] = waiting[node] | BIT(step);
           want(node)
        :: else
        fi
    }
}

inline check(node) {
    atomic {
        for (n : 0 .. NODES - 1) { assert(COPY(node, n) == version[node]) }
        assert(version[node] <= NEWEST);
        n = 0
    }
}

proctype Giver(byte rank) {
    byte step, n, least;

    fetch(NODE_OF(rank), 1);
    version[NODE_OF(rank)] >= 1;
    check(NODE_OF(rank));
    for (step : 2 .. STEPS) {
        if
        :: (GIVERS(step) & BIT(NODE_OF(rank))) && GIVER(NODE_OF(rank), step) == rank ->
           atomic {
               slot[rank] = step;
               admitted[step] = admitted[step] | BIT(NODE_OF(rank))
           }
#ifdef SINGLE
           /* Else it comes unasked. */
           fetch(NODE_OF(rank), step);
#endif
#ifndef BUG_SLOT_REUSED
           version[NODE_OF(rank)] >= step;
           check(NODE_OF(rank))
#endif
        :: else
        fi
    }
    atomic { done++; step = 0 }
}

#if READERS
proctype Reader(byte node) {
    byte step, n, least;

    select(step : 1 .. LAST);
    atomic {
        if
        :: version[node] >= step -> HAPPENS(a step that is there when it is asked for)
        :: else
        fi
    }
    fetch(node, step);
    if
    :: version[node] >= step -> check(node)
#ifdef TIMEOUTS
    :: version[node] < step -> HAPPENS(a wait that is given up)
#else
#ifdef HOPE
    :: step > STEPS -> HAPPENS(a wait that is given up)
#endif
#endif
    fi;
    atomic { done++; step = 0 }
}
#endif

/* Runs when nothing else can. */

proctype Monitor() {
    byte n;

    timeout;
    d_step {
        assert(root_done);
        assert(done == RANKS + READERS);
        do
        :: n < NODES ->
           assert(part[n] == STEPS);
           assert(!busy[n]);
           assert(empty(node_[n]) && empty(orders[n]) && empty(coming[n]));
           assert(empty(report[n]));
           n++
        :: n == NODES -> break
        od;
        n = 0;
        do
        :: n < NODES * NODES ->
           assert(empty(giving[n]) && empty(collecting[n]));
           assert(empty(gradient[n]) && empty(part_of[n]));
           n++
        :: n == NODES * NODES -> break
        od;
        stopped = 1
    }
}

init {
    byte n, to;
    atomic {
        for (n : 0 .. RANKS - 1) { slot[n] = 1; run Giver(n) }
        for (n : 0 .. NODES - 1) {
            part[n] = 1; made[n] = 1;
            run Reports(n); run Agent(n); run Server(n); run Receive(n);
            for (to : 0 .. NODES - 1) {
                if
                :: to != n ->
#ifndef BUG_GIVE_TOGETHER
                   run Giving(n, to);
#endif
#ifndef BUG_COLLECT_TOGETHER
                   run Collecting(n, to)
#endif
                :: else
                fi
            }
        }
        run Root();
#if READERS
        for (n : 1 .. READERS) { run Reader((NODES - n % NODES) % NODES) }
#endif
        run Monitor()
    }
}
