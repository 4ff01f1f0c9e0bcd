/*
 * The protocol of a server whose updates are made of one gradient each, between nodes.
 * In hpcaccum/server: bounded_staleness.py, loop.py, publisher.py,
 * double_buffer.py.
 *
 * tests/system/test_model.py runs it through Spin. A configuration is a set of macros:
 *
 *   RANKS, LOCALS      ranks, and how many of them are on the root's node; the others
 *                      are on REMOTES other nodes, in turn
 *   GRADS              how many gradients each rank pushes; it pulls before each of them
 *                      and after the last one
 *   LAG                largest lag that is admitted
 *   VERSIONS           the root publishes so many versions, and no rank pushes; a rank
 *                      pulls GRADS + 1 times, and waits for any of them
 *   TORN               each access to a double buffer, and each message, is a separate
 *                      step: see 5
 *   FINE               each access to the words of the inbox is a separate step
 *   CRASH              a rank may die between any two steps of a push; it is lost some
 *                      time later
 *   HOPE               a rank may wait for a step that may never come, in vain
 *   TIMEOUTS           a rank may give up any wait for a step
 *   LATE               each gradient has a factor, here its lag
 *   PUSH               with VERSIONS: the root has some of the versions sent to all
 *                      nodes, or without TORN sends them itself, as it does with short
 *                      ones; a rank may wait for these without asking, as after
 *                      synchronous updates (whose admission accumulator.pml models)
 *   BUG_...            one planted bug each: search for the name
 *
 * What is proven: the assertions. Those of Monitor hold in every final state: all ranks
 * and the root are done, all admitted gradients are applied, no agent waits, and no
 * message is left. So there is no deadlock.
 *
 * Not modelled: how a gradient gets to the root from another node (nodes/parts.py),
 * counters, max_lag=math.inf (an addition in place of the swap), a server that continues
 * from a step, updates that ranks make together (node_update.pml), locks that a program
 * holds, errors of the update itself, the death of an agent.
 *
 * Abstractions, and why they hide no error:
 *
 * 1. A gradient is its number, in each of two words of its slot. Parameters are their
 *    step, in each of two words of a copy. Words are written and read in separate steps,
 *    so what is half written or mixed differs in its words. The protocol never reads
 *    payloads.
 * 2. Memory is sequentially consistent: see accumulator.pml.
 * 3. A request to an agent is a process of its own. One statement or d_step stands for
 *    what it does between two yields. The agent runs all of them in one thread, in turn;
 *    here they run in any order. Where a handler needs several steps between two yields,
 *    `copying` keeps the others from what it uses.
 * 4. A request of a rank is a bit, per node and step, and may be received at any time: so
 *    requests may overtake each other, which MPI excludes. Those of an agent keep their
 *    order, and so do words. That the root's agent is told of a step is no message. A
 *    message is sent when it is in the channel; in the code also when it was received,
 *    which delays the sender only. One that is never received is found by Monitor.
 * 5. Without TORN, reading a complete copy is one step, and so are writing one, sending
 *    one and receiving one, which is also the case of a short message. The bugs that
 *    this could hide are looked for with TORN. Without FINE, reading STEP and swapping it
 *    is one step: a swap that succeeds proves that STEP is what was read.
 * 6. Local variables and ghosts: see accumulator.pml, 4.
 * 7. Timeouts may strike whenever a wait could go on: time is not modelled.
 * 8. A first guess at STEP is at most STEP. If it is not STEP, the swap fails and STEP is
 *    known; so the guess is not modelled.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef LOCALS
#define LOCALS 1
#endif
#ifndef REMOTES
#define REMOTES 1
#endif
#ifndef GRADS
#define GRADS 1
#endif
#ifndef LAG
#define LAG 2
#endif
#ifdef VERSIONS
#define STEPS VERSIONS
#else
#define STEPS (RANKS * GRADS)
#endif
/* The last step that is waited for. */
#if defined(VERSIONS) && defined(HOPE)
#define LAST (STEPS + 1)
#else
#define LAST STEPS
#endif
#if REMOTES == 0
#define NODE(rank) 0
#else
#define NODE(rank) ((rank) < LOCALS -> 0 : 1 + ((rank) - LOCALS) % REMOTES)
#endif
#define NODES (1 + REMOTES)

/* Prints, once, that the search reached this: to prove that nothing happens is easy. */
#define HAPPENS(what) \
    c_code { static int before; if (!before++) printf("happens: %s\n", #what); }

/* The inbox. */
byte STEP;
byte APPLIED;
#ifdef BUG_TOO_FEW_PLACES
#define PLACES (RANKS - 1)
#else
#define PLACES RANKS
#endif
byte place[PLACES];             /* step + 1 << 3 | rank */
#ifdef LATE
byte factor[PLACES];
#define FACTOR(step) factor[(step) % PLACES]
byte lag_of[STEPS];             /* A ghost. */
#endif
#define NOBODY 7
byte INTENT[RANKS];             /* 0, or 1 + the step at which it tries to be admitted */
byte LOST;                      /* the set of the lost ranks */
#ifdef BUG_LIVING_MISSING
#define OPEN(rank, step) false
#else
#define OPEN(rank, step) (!(LOST >> (rank) & 1) && INTENT[rank] == 1 + (step))
#endif
#if RANKS == 1
#define ANY_OPEN(step) OPEN(0, step)
#elif RANKS == 2
#define ANY_OPEN(step) (OPEN(0, step) || OPEN(1, step))
#else
#define ANY_OPEN(step) (OPEN(0, step) || OPEN(1, step) || OPEN(2, step))
#endif
#define PLACE(step) place[(step) % PLACES]
byte slot[RANKS * 2];
#define SLOT(rank, i) slot[(rank) * 2 + (i)]
byte LEFT;

/* Of each node: two copies of the parameters, of two words each. */
byte newest[NODES];             /* step << 1 | copy */
byte holds[NODES * 2];
byte half[NODES * 4];
byte PUBLISHED;                 /* the word that `newest` reads across nodes */
#define VERSION(node) (newest[node] >> 1)
#define COPY(node)    (newest[node] & 1)
#define HOLDS(node, copy) holds[(node) * 2 + (copy)]
#define HALF(node, copy, i) half[(node) * 4 + (copy) * 2 + (i)]

/* Agents. A bit per step: the request was sent. */
#define BIT(step) (1 << (step))
byte fetch[NODES];              /* to the node's agent, by its ranks */
byte waiting[NODES];            /* the steps that ranks wait for */
byte asked[NODES];              /* the one that was asked for */
bit receiving[NODES];
byte told;                      /* the last step that the root's agent is told of */
byte known;                     /* and the last that it knows */
byte wants[NODES];
byte promised[NODES];
byte sent[NODES];
/* Snapshots: one per node that is sent to. */
byte snapshot[NODES];         /* its step */
byte users[NODES];
byte content[NODES * 2];
#define CONTENT(k, i) content[(k) * 2 + (i)]
bit copying;
bit stopped;                    /* The agents stop. */
byte pushes;                    /* the steps that nodes wait for and do not ask for */
#define AWAITED(step) (pushes >> (step) & 1)
#if defined(PUSH) && !defined(TORN)
#define PUSHED                  /* short ones, by the root itself */
#endif

/* To the root's agent, by node: a step that it wants; and what that agent has to do. */
chan ask[NODES] = [4] of { byte };
chan job[NODES] = [4] of { byte };
/* From the root's agent, by node: the steps to take, and two words of each. */
chan take[NODES] = [4] of { byte };
chan data[NODES] = [8] of { byte };

/* Ghosts: the truth, for assertions only. */
byte step_now;                  /* gradients admitted */
byte order[STEPS];              /* the gradient of each step; 0: lost */
byte applied_now;
byte sent_now[NODES];           /* the last step sent */
bit root_done;
byte at_work;                   /* handlers that send */

#define MASK(step) (BIT((step) + 1) - 1)

/* Copies of parameters. In the code: DoubleBuffer. */

inline begin_copy(node, step) {
    HOLDS(node, 1 - COPY(node)) = step
}

inline fill(node, i, value) {
    HALF(node, 1 - COPY(node), i) = value
}

inline complete_copy(node, step) {
    newest[node] = step << 1 | 1 - COPY(node)
}

/* Send a short step to all nodes, if they wait. In the code: Publisher._push. */
inline push(step) {
#ifdef PUSHED
    if
    :: AWAITED(step) ->
       take[1]!step; data[1]!step; data[1]!step
#if REMOTES > 1
       ; take[2]!step; data[2]!step; data[2]!step
#endif
    :: else
    fi
#else
    skip
#endif
}

/* The root. */

proctype Root() {
    byte step, rank, first, second;

#ifndef VERSIONS
end:
    do
    :: PLACE(step) >> 3 == step + 1 ->
       d_step { rank = PLACE(step) & 7 };
#ifdef LATE
       d_step {
           assert(FACTOR(step) == lag_of[step]);
           if
           :: lag_of[step] -> HAPPENS(a late gradient is discounted)
           :: else
           fi
       };
#endif
found:
#ifdef BUG_APPLIED_EARLY
       APPLIED = step + 1;
#endif
       if
       :: rank != NOBODY ->
          first = SLOT(rank, 0);
          d_step {
              second = SLOT(rank, 1);
              assert(first == order[step] && second == order[step]);
              first = 0; second = 0
          }
       :: d_step { rank == NOBODY -> assert(!order[step]); HAPPENS(an empty update) }
       fi;
       d_step {
           assert(applied_now == step && step < step_now);
           rank = 0;
           step++;
           applied_now = step
       };
#else
    do
    :: step < VERSIONS -> step++;
#endif
#ifdef TORN
#ifndef BUG_HOLDS_LATE
       begin_copy(0, step);
#endif
       fill(0, 0, step);
#ifdef BUG_HOLDS_LATE
       begin_copy(0, step);
#endif
       fill(0, 1, step);
#ifndef BUG_PUBLISHED_LATE
       PUBLISHED = step;
#endif
       complete_copy(0, step);
#ifdef BUG_PUBLISHED_LATE
       PUBLISHED = step;
#endif
#else
       d_step {
           begin_copy(0, step); fill(0, 0, step); fill(0, 1, step);
           push(step);
           PUBLISHED = step;
           complete_copy(0, step)
       };
#endif
       d_step { APPLIED = step; told = step }
#ifdef VERSIONS
    :: step == VERSIONS && LEFT == RANKS -> break
#else
#ifdef CRASH
#ifdef BUG_EARLY_LOOK
    :: STEP > step && PLACE(step) >> 3 != step + 1;
       if
       :: d_step { !ANY_OPEN(step) -> rank = NOBODY } goto found
       :: ANY_OPEN(step)
       fi
#else
    :: STEP > step && !ANY_OPEN(step) && PLACE(step) >> 3 != step + 1;
       if
       :: d_step { PLACE(step) >> 3 != step + 1 -> rank = NOBODY } goto found
       :: PLACE(step) >> 3 == step + 1
       fi
#endif
#endif
    :: LEFT == RANKS && PLACE(step) >> 3 != step + 1 && STEP == step -> break
#endif
    od;
    root_done = 1
}

/* Ranks that push and pull. */

/* The copy that was read is valid. */
inline accept() {
    local_step = seen >> 1;
    assert(first == local_step && second == local_step);
    assert(local_step <= PUBLISHED);
    seen = 0; first = 0; second = 0
}

inline admit() {
#ifndef BUG_CHECK_APART
    assert(s == step_now);
#endif
    assert(step_now - local_step <= LAG);
    STEP++;
    step_now++;
    order[s] = me * GRADS + i + 1;
    submitted = s + 1
}

inline put(rank) {
    assert(PLACE(s) >> 3 <= APPLIED);
    PLACE(s) = s + 1 << 3 | (rank);
    s = 0; local_step = 0;
    i++
}

/* The root's node needs no request. */
inline want(step) {
    wanted = step;
    fetch[node] = fetch[node] | (node && VERSION(node) < wanted -> BIT(wanted) : 0)
}

/* The step comes unasked. */
inline await(step) {
    wanted = step
}

proctype Rank(byte me, node) {
    byte i, local_step, submitted, wanted, s;
    byte seen, first, second;

pull:
    if
#ifdef VERSIONS
    :: d_step { true -> want(1) }
    :: d_step { true -> want(2) }
#ifdef PUSH
    :: d_step { AWAITED(1) -> await(1) }
    :: d_step { AWAITED(2) -> await(2) }
#endif
#if VERSIONS > 2
    :: d_step { true -> want(3) }
#endif
#ifdef HOPE
    :: d_step { true -> want(VERSIONS + 1) }
#endif
#else
    :: true
    :: d_step { submitted -> want(submitted) }
    :: d_step { STEP > submitted -> want(STEP) }
#ifdef HOPE
    :: d_step { STEP < STEPS -> want(STEP + 1) }
#endif
#endif
    fi;
    if
    :: d_step {
           VERSION(node) >= wanted ->
           if
           :: wanted && VERSION(node) > wanted -> HAPPENS(a newer step comes)
           :: else
           fi
       }
#ifdef TIMEOUTS
    :: d_step { VERSION(node) < wanted -> HAPPENS(a rank gives up) }
#elif defined(HOPE) && defined(VERSIONS)
    :: d_step { wanted > VERSIONS -> HAPPENS(a rank gives up) }
#elif defined(HOPE)
    :: d_step { wanted > STEP -> HAPPENS(a rank gives up) }
#endif
    fi;
    wanted = 0;

read:
#ifdef TORN
    seen = newest[node];
    first = HALF(node, seen & 1, 0);
    second = HALF(node, seen & 1, 1);
    if
#ifndef BUG_UNCHECKED
    :: d_step {
           HOLDS(node, seen & 1) != seen >> 1 ->
           seen = 0; first = 0; second = 0;
           HAPPENS(a copy is overtaken)
       }
       goto read
    :: d_step {
           HOLDS(node, seen & 1) == seen >> 1 ->
#else
    :: d_step {
           true ->
#endif
           accept()
       }
    fi;
#else
    d_step {
        seen = newest[node];
        first = HALF(node, seen & 1, 0);
        second = HALF(node, seen & 1, 1);
        accept()
    };
#endif

    if
    :: i == GRADS -> goto end
#ifdef VERSIONS
    :: d_step { i < GRADS -> i++; local_step = 0 } goto pull
    fi;
#else
#ifdef BUG_SLOT_REUSED
    :: i < GRADS
#else
    :: i < GRADS && APPLIED >= submitted
#endif
    fi;
    SLOT(me, 0) = me * GRADS + i + 1;
    SLOT(me, 1) = me * GRADS + i + 1;

#ifdef CRASH
    s = STEP;
swap:
    if
    :: d_step { s - local_step > LAG -> HAPPENS(a gradient is dropped); i++; s = 0;
                local_step = 0; INTENT[me] = 0 }
       goto pull
    :: s - local_step <= LAG
    fi;
#ifndef BUG_LATE_INTENT
    if
    :: INTENT[me] = 1 + s
    :: d_step { true -> HAPPENS(a rank dies before it is admitted) } goto dead
    fi;
#endif
    if
    :: d_step { STEP == s -> admit() }
    :: d_step { STEP != s -> HAPPENS(a swap fails); s = STEP } goto swap
    :: d_step { true -> HAPPENS(a rank dies before it is admitted) } goto dead
    fi;
#ifdef BUG_LATE_INTENT
    INTENT[me] = 1 + s;
#endif
    if
    :: d_step { true -> put(me) }
    :: d_step { true -> order[s] = 0; HAPPENS(a rank dies when it is admitted) } goto dead
    fi;
    if
    :: INTENT[me] = 0
    :: d_step { true -> HAPPENS(a rank dies when its gradient is there) } goto dead
    fi;
#else
swap:
#ifdef FINE
    s = STEP;
    if
    :: d_step { s - local_step > LAG -> HAPPENS(a gradient is dropped); i++; s = 0;
                local_step = 0 }
       goto pull
    :: s - local_step <= LAG ->
       if
#ifdef BUG_CHECK_APART
       :: d_step { true -> s = STEP; admit() }
#else
       :: d_step { STEP == s -> admit() }
       :: d_step { STEP != s -> HAPPENS(a swap fails); s = 0 } goto swap
#endif
       fi
    fi;
#else
    if
    :: d_step { STEP - local_step > LAG -> HAPPENS(a gradient is dropped); i++;
                local_step = 0 }
       goto pull
    :: d_step { STEP - local_step <= LAG -> s = STEP; admit() }
    fi;
#endif
#ifdef LATE
    d_step { lag_of[s] = s - local_step };
#ifndef BUG_FACTOR_LATE
    FACTOR(s) = s - local_step;
#endif
#endif
#ifdef BUG_FACTOR_LATE
    PLACE(s) = s + 1 << 3 | me;
    d_step { FACTOR(s) = s - local_step; s = 0; local_step = 0; i++ };
#else
    d_step { put(me) };
#endif
#endif
    goto pull;
#ifdef CRASH
dead:
    s = 0; local_step = 0; i = 0; submitted = 0;
    LOST = LOST | 1 << me;
#endif
#endif
end:
    LEFT++
}

#if REMOTES
/* The agent of another node. In the code: Publisher._do_fetch. */

inline ask_least() {
    least = 1;
    do
    :: least <= LAST && !(waiting[node] & BIT(least)) -> least++
    :: else -> break
    od;
    if
    :: least <= LAST && (!asked[node] || least < asked[node]) ->
       asked[node] = least;
       ask[node]!least
    :: else
    fi;
    least = 0
}

proctype Fetch(byte node, wanted) {
    byte least;

end:
    do
    :: d_step {
           fetch[node] & BIT(wanted) ->
           fetch[node] = fetch[node] & ~BIT(wanted);
           if
           :: VERSION(node) < wanted ->
              if
              :: asked[node] && asked[node] <= wanted ->
                 HAPPENS(a step was asked for before)
              :: else
              fi;
              waiting[node] = waiting[node] | BIT(wanted);
              ask_least()
           :: else
           fi
       }
    :: stopped -> break
    od
}

/* The same agent. In the code: Publisher._do_take. */

/* A step has come: no older one is awaited any more. */
inline arrive() {
    assert(VERSION(node) < step);
    complete_copy(node, step);
    waiting[node] = waiting[node] & ~MASK(step);
    asked[node] = 0;
#ifndef BUG_NOT_ASKED_AGAIN
    if
    :: waiting[node] -> HAPPENS(an older step comes); ask_least()
    :: else
    fi;
#endif
    step = 0
}

inline begin_take() {
    take[node]?step;
    begin_copy(node, step)
}

inline receive_word(i) {
    data[node]?value;
    assert(value == step);
    fill(node, i, value);
    value = 0
}

proctype Take(byte node) {
    byte step, value, least;

end:
    do
#ifdef TORN
#ifdef BUG_RECEIVE_TOGETHER
    :: d_step { nempty(take[node]) -> begin_take() };
#else
    :: d_step {
           nempty(take[node]) && !receiving[node] -> receiving[node] = 1; begin_take()
       };
#endif
       d_step { nempty(data[node]) -> receive_word(0) };
       d_step { nempty(data[node]) -> receive_word(1) };
       d_step { arrive(); receiving[node] = 0 }
#else
    :: d_step {
           nempty(take[node]) ->
           take[node]?<step>;
           if
#ifdef PUSHED
           :: step <= VERSION(node) ->
              HAPPENS(the root and its agent have sent a step);
              take[node]?step; data[node]?value; data[node]?value;
              step = 0; value = 0
#endif
           :: else ->
              begin_take(); receive_word(0); receive_word(1); arrive()
           fi
       }
#endif
    :: stopped -> break
    od
}

/* The root's agent. In the code: Publisher._do_want. */

inline promise(node) {
    assert(promised[node] < known);
    promised[node] = known;
#ifndef BUG_WANT_DROPPED
    if
    :: wants[node] <= known -> wants[node] = 0
    :: else -> HAPPENS(an older step than a node wants)
    fi
#else
    wants[node] = 0
#endif
}

proctype Want(byte node) {
    byte step;

end:
    do
    :: d_step {
           nempty(ask[node]) ->
           ask[node]?step;
           if
           :: step <= promised[node] -> HAPPENS(a step was promised before)
           :: step > promised[node] && step <= known ->
#ifndef BUG_WANT_FORGOTTEN
              promise(node);
              job[node]!known
#endif
           :: step > known ->
#ifndef BUG_LEAST_WANT
              wants[node] = step
#else
              wants[node] = (wants[node] && wants[node] < step -> wants[node] : step)
#endif
           fi;
           step = 0
       }
    :: stopped -> break
    od
}

/* In the code: Publisher._do_published. */

inline published(node) {
    if
    :: AWAITED(known) || (wants[node] && wants[node] <= known) ->
       promise(node);
       if
#ifdef PUSHED
       :: AWAITED(known) && sent[node] < known -> sent[node] = known
       :: AWAITED(known) && sent[node] >= known
#endif
       :: else -> job[node]!known
       fi
    :: else
    fi
}

proctype Published() {
end:
    do
    :: d_step {
           known < told ->
           known++;
           published(1)
#if REMOTES > 1
           ; published(2)
#endif
       }
    :: stopped -> break
    od
}

/* In the code: Publisher._send_to, for each node in turn. */

#define LATEST(k) (snapshot[k] == VERSION(0))
#if REMOTES > 1
#define FOUND (LATEST(0) || LATEST(1))
#else
#define FOUND LATEST(0)
#endif

/* A snapshot that is there already, for one more node. */
inline use_snapshot() {
    mine = (LATEST(0) -> 0 : 1);
    users[mine]++
}

/* Begin to copy to one that no node uses. */
inline begin_snapshot() {
#ifndef BUG_USERS_UNCHECKED
    mine = (users[0] -> 1 : 0);
    assert(mine < REMOTES && !users[mine]);
#endif
    seen = newest[0]
}

inline copy_word(i) {
    CONTENT(mine, i) = HALF(0, seen & 1, i)
}

inline end_snapshot() {
    snapshot[mine] = seen >> 1;
    users[mine] = 1;
    seen = 0
}

inline send_header() {
    assert(snapshot[mine] > sent_now[node]);
    assert(snapshot[mine] >= wanted);
    assert(AWAITED(wanted) || AWAITED(snapshot[mine]) || asked[node]);
    assert(!asked[node] || asked[node] <= snapshot[mine] || AWAITED(wanted));
    sent_now[node] = snapshot[mine];
    sent[node] = snapshot[mine];
    take[node]!snapshot[mine]
}

inline send_word(i) {
    data[node]!CONTENT(mine, i)
}

#ifdef BUG_SENT_UNCHECKED
#define SENT false
#else
#define SENT (sent[node] >= wanted)
#endif
proctype Send(byte node) {
    byte wanted, mine, seen;

end:
    if
    :: d_step {
           nempty(job[node]) ->
           job[node]?wanted;
           at_work++;
#ifndef TORN
           if
           :: SENT -> HAPPENS(a step was sent before)
           :: else ->
              if
              :: FOUND -> use_snapshot()
              :: else -> begin_snapshot(); copy_word(0); copy_word(1); end_snapshot()
              fi;
              send_header(); send_word(0); send_word(1);
              users[mine]--;
              mine = 0
           fi;
           wanted = 0;
           at_work--
#endif
       }
    :: stopped -> goto stop
    fi;
#ifdef TORN
    if
    :: d_step { SENT -> wanted = 0; at_work--; HAPPENS(a step was sent before) }
       goto end
    :: !SENT
    fi;
look:
    if
    :: d_step { !copying && FOUND -> use_snapshot() }
    :: d_step { !copying && !FOUND -> begin_snapshot(); copying = 1 };
       copy_word(0);
       copy_word(1);
       if
       :: d_step {
              HOLDS(0, seen & 1) != seen >> 1 ->
              snapshot[mine] = 0; users[mine] = 0; mine = 0; seen = 0;
              copying = 0;
              HAPPENS(a snapshot is overtaken)
          }
          goto look
       :: d_step {
              HOLDS(0, seen & 1) == seen >> 1 -> end_snapshot(); copying = 0
          }
       fi
    fi;
    d_step { nfull(take[node]) -> send_header() };
    d_step { nfull(data[node]) -> send_word(0) };
    d_step { nfull(data[node]) -> send_word(1) };
    d_step { users[mine]--; mine = 0; wanted = 0; at_work-- };
#endif
    goto end;
stop:
    skip
}
#endif

proctype Monitor() {
    byte node;

    timeout;
    d_step {
        assert(LEFT == RANKS);
        assert(root_done && APPLIED == VERSION(0));
#ifndef VERSIONS
        assert(APPLIED == STEP && STEP == step_now);
#endif
        do
        :: node < NODES ->
           /* Only a step that was never made has not come. */
           assert(!(waiting[node] & MASK(VERSION(0))));
           assert(!fetch[node] && !receiving[node]);
           assert(empty(ask[node]) && empty(job[node]));
           assert(empty(take[node]) && empty(data[node]));
           node++
        :: node == NODES -> break
        od;
        assert(!at_work);
        stopped = 1
    }
}

init {
    byte node, step;
    atomic {
#ifdef PUSH
        for (step : 1 .. VERSIONS) {
            if
            :: pushes = pushes | BIT(step)
            :: true
            fi
        }
#endif
        run Root();
        for (step : 0 .. RANKS - 1) { run Rank(step, NODE(step)) }
#if REMOTES
        for (node : 1 .. REMOTES) {
            run Take(node);
#ifdef BUG_RECEIVE_TOGETHER
            run Take(node);
#endif
            run Want(node);
            run Send(node);
#ifdef BUG_SEND_TOGETHER
            run Send(node);
#endif
            for (step : 1 .. LAST) { run Fetch(node, step) }
        }
        run Published();
#endif
        run Monitor()
    }
}
