/*
 * The protocol of hpcaccum.ConditionalAccumulator. In hpcaccum/accumulator: protocol.py,
 * writer.py, take.py, turns.py, membership.py, host_calls.py.
 *
 * tests/system/test_model.py runs it through Spin. A configuration is a set of macros:
 *
 *   WRITERS, GRADS     ranks that apply gradients, and how many each applies
 *   TAKERS, TAKES      ranks that take, and how often; a take requires 1 to NEED
 *                      gradients
 *   FINE               each access to a shared word is a separate step: see 5
 *   STALE              a gradient carries the step that was read before it was computed;
 *                      without STALE no gradient is stale (more rounds from as many
 *                      gradients)
 *   LATE               one that is one step late joins the open round, too
 *   TIMEOUTS           a take may fail: in line, for lack of gradients, because admitted
 *                      writers do not finish, because its caller cannot use the result;
 *                      for lack of gradients it may also go on with those there are
 *   KNOWN              a writer remembers which buffer the other round holds, as
 *                      writer.py does; without, it reads that record
 *   SETTER             a process sets the step: to 0, then to 2
 *   OBSERVER           a process reads the number of accumulated gradients
 *   LEAVE              writers leave when they are done, and quorums shrink
 *   CRASH              a writer may die between any two steps; it is lost some time later
 *   TAKER_CRASH        so may a taker, but the first one, which is on the root
 *   BUG_...            one planted bug each: search for the name
 *
 * What is proven: the assertions. Those of Monitor hold in every final state. Monitor
 * also checks that nothing waits in a final state but a take that has too few
 * gradients, and the takes in line behind it. So there is no deadlock.
 *
 * Not modelled: storage="sum", the number of the round's shape in STATE, quorums of
 * more gradients than writers, overflow of a field, a rank that is taken for dead.
 *
 * Abstractions, and why they hide no error:
 *
 * 1. A gradient is one bit; a buffer is two words that hold sets of bits, written in
 *    separate steps. A gradient too many, too few or half written is a wrong set, or two
 *    sets that differ. The protocol never reads payloads. A buffer that no record names
 *    holds all bits: to use it as a sum gives a wrong set. The weight of a gradient is
 *    its bit, so the sum of the weights of a round is the set of its gradients.
 * 2. A rank that applies and takes at the same time is two processes. Takes of one rank
 *    queue inside it, and so do its applies.
 * 3. Memory is sequentially consistent: the code waits for each operation on a word, or
 *    loads and stores it between two MPI_Win_sync, which are taken to be full fences.
 *    (The mark `writing` may arrive later than in the model, but never after the record
 *    that follows it: MPI keeps the order of accumulates to one place. Only messages
 *    depend on it.)
 * 4. Local variables commute with all steps of others, and ghosts decide nothing: a
 *    step (a statement or d_step) may work on them besides its access to shared memory.
 * 5. Without FINE, accesses that no process can distinguish are one step:
 *    - Reading STATE and swapping it. A swap that succeeds proves that STATE is what
 *      was read, whenever that was; one that fails changes nothing.
 *    - Accesses to words that only the taker with the turn uses (CLOSED; WANT, without
 *      an observer). That only one taker has the turn is asserted.
 *    - A writer's record of the round to which it was admitted, and its weight: no
 *      other process accesses them until the record counts the gradient. Asserted
 *      through `read_now`.
 *    - The taker's reads of a complete round. From the moment at which it has seen that
 *      the round is complete until it clears, no process writes what it reads: asserted
 *      through `read_now`.
 *    - Clearing. A writer that finds its record of the other parity cleared early may do
 *      what it may do if it finds it late, and more.
 *    - Choosing a buffer and beginning to write. If the other one becomes free between,
 *      the two are alike.
 *    The FINE configurations, which are smaller, do not rely on this.
 *    In all of them the taker reads the records of all ranks in one step to see whether
 *    the round is complete. Their sum is at most the number of the closed round and
 *    only grows: it is that number only if each was read when it was final.
 * 6. Buffers that no record names are alike: a writer takes the first one. Takers are
 *    alike: they draw their first tickets in rank order.
 * 7. Timeouts may strike whenever a take could wait: time is not modelled. How many
 *    gradients a take requires is decided when it needs to know.
 * 8. After a failed compare-and-swap STATE is read anew. The code uses the word that the
 *    swap returned, which is the case that nothing happens in between. Between nodes, an
 *    agent makes the steps of an admission or a take for a rank that waits: the same
 *    steps in the same order, by another process. It is this agent that says that the
 *    rank is lost, between two of them. So here, too, a taker that is lost does nothing
 *    any more (BUG_LOST_MEANWHILE: it goes on).
 * 9. Who finds out that a process is dead is not modelled: that comes at any time after
 *    it. An exception in a call is the same case: its rank says that it is lost. Only
 *    the CRASH configurations have intents and the mark `writing`, which nobody reads
 *    as long as no rank is lost.
 * 10. A place in the line is passed as soon as it is seen to be no obstacle, in any
 *    order. The code requires that it sees all of them at once, which allows less.
 */

#ifndef WRITERS
#define WRITERS 3
#endif
#ifndef GRADS
#define GRADS 1
#endif
#ifndef TAKERS
#define TAKERS 2
#endif
#ifndef TAKES
#define TAKES 1
#endif
#ifdef LATE
#define MOST_LAG 1
#else
#define MOST_LAG 0
#endif
#ifndef NEED
#define NEED 2
#endif
#if defined(KNOWN) || defined(BUG_OLD_KNOWLEDGE)
#define REMEMBERS
#endif

/* Prints, once, that the search reached this: to prove that nothing happens is easy. */
#define HAPPENS(what) \
    c_code { static int before; if (!before++) printf("happens: %s\n", #what); }

/* STATE = step | parity | waiting | count */
#define WORD(step, parity, waiting, count) \
    ((step) << 6 | (parity) << 5 | (waiting) << 4 | (count))
#define STEP(word)    ((word) >> 6)
#define PARITY(word)  ((word) >> 5 & 1)
#define WAITING(word) ((word) >> 4 & 1)
#define COUNT(word)   ((word) & 15)
short STATE;

/* What the taker that has the turn closes, whether or not it has: number << 2 |
 * reduced << 1 | parity; or 0. */
byte CLOSED;
byte TICKET;
byte LINE[TAKERS];              /* ticket + 1, or: */
#define ABSENT  0
#define DRAWING 255
byte WANT;                      /* tag << 2 | wanted */
byte LEFT;

/* Of each rank: 0, or 1 + the parity of the round that it tries to join. */
byte INTENT[WRITERS];
byte LOST;                      /* the set of the lost writers */
byte LOST_TAKERS;

/* Of each rank, by parity: number << 3 | writing << 2 | buffer (1 or 2), or 0. */
byte records[WRITERS * 2];
#define RECORD(rank, parity) records[(rank) * 2 + (parity)]
#define BUFFER(word)  ((word) & 3)
#define WRITING(word) ((word) >> 2 & 1)
#define NUMBER(word)  ((word) >> 3 & 3)
#define ARRIVED(rank, parity) NUMBER(RECORD(rank, parity))
/* Likewise: the sum of the weights of these gradients. */
byte weights[WRITERS * 2];
#define WEIGHT(rank, parity) weights[(rank) * 2 + (parity)]
/* A sum to which a lost rank was adding is left out. */
#define USABLE(rank, parity) \
    (NUMBER(RECORD(rank, parity)) && !WRITING(RECORD(rank, parity)))
#ifdef BUG_LIVING_MISSING
#define OPEN(rank, parity) false
#else
#define OPEN(rank, parity) \
    (!(LOST >> (rank) & 1) && INTENT[rank] == 1 + (parity))
#endif
#if WRITERS == 1
#define ALL_ARRIVED(parity) ARRIVED(0, parity)
#define ANY_OPEN(parity) OPEN(0, parity)
#elif WRITERS == 2
#define ALL_ARRIVED(parity) (ARRIVED(0, parity) + ARRIVED(1, parity))
#define ANY_OPEN(parity) (OPEN(0, parity) || OPEN(1, parity))
#else
#define ALL_ARRIVED(parity) \
    (ARRIVED(0, parity) + ARRIVED(1, parity) + ARRIVED(2, parity))
#define ANY_OPEN(parity) (OPEN(0, parity) || OPEN(1, parity) || OPEN(2, parity))
#endif

/* Of each rank, by buffer: two words. */
#define NOTHING 255
byte payload[WRITERS * 4] = NOTHING;
#define PAYLOAD(rank, buffer, i) payload[(rank) * 4 + (buffer) * 2 - 2 + (i)]

/* Ghosts: the truth, for assertions only. */
byte step_now;
bit open_now;                   /* parity of the open round */
byte admitted[2];               /* gradients of the round of each parity: the set, */
byte tally[2];                  /* and how many */
byte lost_in[2];                /* of these, how many a lost writer has not left */
byte accepted;                  /* all gradients ever admitted */
byte taken;                     /* all gradients ever returned by takes */
byte wanted_now;                /* by the take that waits for gradients */
byte head;                      /* 1 + the taker whose turn it is */
byte next_ticket;               /* lower ones must not have their turn any more */
bit read_now[2];                /* whether a taker reads the round of this parity */
byte first_draws;

inline check_state() {
    assert(STEP(STATE) == step_now && PARITY(STATE) == open_now);
    assert(tally[open_now] ==
        (WAITING(STATE) -> wanted_now - COUNT(STATE) : COUNT(STATE)))
}

/* STATE was just replaced by one of the next round. */
inline check_closed() {
    step_now++;
    open_now = 1 - open_now;
    wanted_now = 0;
    assert(tally[open_now] == 0);
    check_state()
}

inline admit() {
    check_state();
    p = open_now;
#ifdef STALE
    assert(local_step + MOST_LAG >= step_now);
#ifdef LATE
    if
    :: local_step < step_now -> HAPPENS(a late gradient is admitted)
    :: else
    fi;
#endif
#endif
    assert(!(accepted & gradient));
    accepted = accepted | gradient;
    admitted[p] = admitted[p] | gradient;
    tally[p]++;
    if
    :: WAITING(s) && COUNT(s) == 1 ->
        HAPPENS(a writer closes the round);
        STATE = WORD(STEP(s) + 1, 1 - p, 0, 0);
        check_closed()
    :: WAITING(s) && COUNT(s) > 1 -> STATE = s - 1; check_state()
    :: !WAITING(s) -> STATE = s + 1; check_state()
    fi;
    s = 0
}

/* Another gradient for the buffer that this round has already. */
inline join(word) {
    buffer = BUFFER(word);
    number = NUMBER(word);
    HAPPENS(a gradient joins another)
}

/* A buffer that the other round does not hold. */
inline choose() {
#ifdef BUG_ANY_BUFFER
    buffer = 1
#elif defined(REMEMBERS)
    mine[p] = 0;
    if
    :: mine[1 - p] && !RECORD(me, 1 - p) -> HAPPENS(a writer takes a buffer for used)
    :: else
    fi;
    buffer = (BUFFER(mine[1 - p]) == 1 -> 2 : 1)
#else
    buffer = (BUFFER(RECORD(me, 1 - p)) == 1 -> 2 : 1)
#endif
}

inline store(i) {
    assert(!(read_now[0] && BUFFER(RECORD(me, 0)) == buffer));
    assert(!(read_now[1] && BUFFER(RECORD(me, 1)) == buffer));
    PAYLOAD(me, buffer, i) = (number -> PAYLOAD(me, buffer, i) | gradient : gradient)
}

/* The word of the weights, before the record. */
inline weigh() {
    assert(!read_now[p]);
    WEIGHT(me, p) = (number -> WEIGHT(me, p) : 0) + gradient
}

inline name(writing) {
    assert(!read_now[p]);
    RECORD(me, p) = number + 1 - writing << 3 | writing << 2 | buffer
}

inline done() {
#ifdef REMEMBERS
    mine[p] = RECORD(me, p);
#endif
    next()
}

#ifdef CRASH
#define MINE (((1 << GRADS) - 1) << (me * GRADS))
/* The writer dies; what it was admitted with, and has not left, is in no set any more. */
inline crash_before() {
    HAPPENS(a writer dies before it is admitted)
}

inline crash_writing() {
    if
    :: number && WRITING(RECORD(me, p)) ->
        HAPPENS(a writer dies while it adds);
        lost_in[p] = lost_in[p] + number + 1;
        accepted = accepted & ~(admitted[p] & MINE);
        admitted[p] = admitted[p] & ~MINE
    :: else ->
        HAPPENS(a writer dies while it writes);
        lost_in[p]++;
        accepted = accepted & ~gradient;
        admitted[p] = admitted[p] & ~gradient
    fi
}

inline crash_after() {
    HAPPENS(a writer dies when it has written)
}

/* Somebody finds out. */
inline lose_writer() {
    LOST = LOST | 1 << me;
    LEFT++
}
#endif

inline next() {
    p = 0; buffer = 0; number = 0;
    i++;
    gradient = (i < GRADS -> gradient << 1 : 0)
}

proctype Writer(byte me) {
    short s;
    byte i, local_step, buffer, number;
    byte gradient = 1 << (me * GRADS);
    bit p;
#ifdef REMEMBERS
    byte mine[2];               /* the last record written; 0: surely none */
#endif

begin:
    if
#ifdef LEAVE
    :: d_step { i == GRADS -> LEFT++ } goto end
#else
    :: i == GRADS -> goto end
#endif
    :: i == 0
#ifdef STALE
    :: d_step { i > 0 && i < GRADS -> s = STATE; local_step = STEP(s); s = 0 }
#else
    :: i > 0 && i < GRADS
#endif
    fi;

apply:
#ifdef CRASH
    if
    :: d_step {
           true ->
           s = STATE;
#ifndef BUG_LATE_INTENT
           INTENT[me] = 1 + PARITY(s)
#endif
       }
    fi;
swap:
    if
    :: d_step { STATE == s -> admit() }
    :: d_step { STATE != s -> s = STATE; HAPPENS(a swap fails) };
#if !defined(BUG_KEPT_INTENT) && !defined(BUG_LATE_INTENT)
       INTENT[me] = 1 + PARITY(s);
#endif
       goto swap
    :: d_step { true -> crash_before() } goto dead
    fi;
#ifdef BUG_LATE_INTENT
    if
    :: INTENT[me] = 1 + p
    :: d_step { true -> crash_writing() } goto dead
    fi;
#endif
    if
#if GRADS > 1
    :: d_step { RECORD(me, p) -> join(RECORD(me, p)) };
       if
#ifdef BUG_NOT_MARKED
       :: true
#else
       :: d_step { true -> name(1) }
#endif
       :: d_step { true -> crash_writing() } goto dead
       fi
#endif
    :: d_step { !RECORD(me, p) -> choose() }
    :: d_step { !RECORD(me, p) -> crash_writing() } goto dead
    fi;
    if
    :: d_step { true -> store(0) }
    :: d_step { number > 0 -> crash_writing() } goto dead
    fi;
    if
    :: d_step { true -> store(1) }
    :: d_step { true -> crash_writing() } goto dead
    fi;
    if
    :: d_step { true -> weigh() }
    :: d_step { true -> crash_writing() } goto dead
    fi;
    if
    :: d_step { true -> name(0) }
    :: d_step { true -> crash_writing() } goto dead
    fi;
    if
    :: d_step { true -> INTENT[me] = 0; done() }
    :: d_step { true -> crash_after() } goto dead
    fi;
    goto begin;
dead:
    if
    :: d_step {
           true ->
           lose_writer();
           s = 0; i = 0; p = 0; buffer = 0; number = 0; gradient = 0
       }
    fi;
#else
    if
#ifdef STALE
    :: d_step {
           local_step + MOST_LAG < STEP(STATE) ->
           s = STATE;
           s = 0;
           next();
           HAPPENS(a gradient is dropped)
       }
       goto begin
#else
#define local_step 100
#endif
#ifdef FINE
    :: d_step { local_step + MOST_LAG >= STEP(STATE) -> s = STATE }
    fi;
#ifdef BUG_STALE_ADMITTED
swap:
    if
    :: d_step { STATE != s -> s = STATE } goto swap
#else
    if
    :: d_step { STATE != s -> s = 0 } goto apply
#endif
    :: d_step { STATE == s -> admit() }
#else
    :: d_step { local_step + MOST_LAG >= STEP(STATE) -> s = STATE; admit() }
#endif
    fi;

    if
#ifdef BUG_OLD_KNOWLEDGE
    :: d_step { mine[p] -> join(mine[p]); store(0) }
    :: d_step { !mine[p] -> choose(); store(0) }
#elif defined(FINE)
#if GRADS > 1
    :: d_step { RECORD(me, p) -> join(RECORD(me, p)) };
       d_step { name(1) };
       d_step { store(0) }
#endif
    :: !RECORD(me, p) ->
       d_step { choose() };
       d_step { store(0) }
#else
    :: d_step { RECORD(me, p) -> join(RECORD(me, p)); store(0) }
    :: d_step { !RECORD(me, p) -> choose(); store(0) }
#endif
    fi;
#ifdef BUG_DONE_EARLY
    if
    :: d_step { true -> name(0) }
    fi;
#endif
    d_step { store(1) };
#ifdef BUG_WEIGHT_LATE
    d_step { name(0) };
    d_step { weigh(); done() };
#elif defined(FINE)
    d_step { weigh() };
    d_step { name(0) };
    d_step { done() };
#else
    d_step { weigh(); name(0); done() };
#endif
    goto begin;
#endif
end:
    skip
}

#define ALL ((1 << TAKERS) - 1)

/* The place of `other` is no obstacle; with the last one found so, the turn comes. */
#ifdef BUG_NO_DRAWING_WAIT
#define FREE(place) (place == ABSENT || place == DRAWING || place > ticket + 1)
#else
#define FREE(place) (place != DRAWING && (place == ABSENT || place > ticket + 1))
#endif
#define PASS(other) \
    d_step { \
        !(passed >> other & 1) && (FREE(LINE[other]) || LOST_TAKERS >> other & 1) -> \
        passed = passed | 1 << other; \
        if \
        :: passed == ALL -> arrive() \
        :: else \
        fi \
    }

inline arrive() {
    assert(head == 0);
    assert(ticket >= next_ticket);
    head = me + 1;
    next_ticket = ticket + 1;
    ticket = 0;
#ifndef FINE
    recall()
#endif
}

/* What an earlier take closed and could not finish. */
inline recall() {
    p = CLOSED & 1;
    number = CLOSED >> 2;
    reduced = CLOSED >> 1 & 1;
    resumed = (number && PARITY(STATE) != p);
    left_waiting = (number && PARITY(STATE) == p && WAITING(STATE));
    wanted = (left_waiting -> number : 0);
    p = (resumed -> p : 0);
    number = (resumed -> number : 0)
}

inline want() {
#ifdef LEAVE
    left = LEFT;
    wanted = (WRITERS - left < required -> WRITERS - left : required);
    wanted = (wanted -> wanted : 1)
#else
    wanted = required
#endif
}

/* Publish the request in WANT, which only the taker that has the turn changes. */
inline announce() {
    assert(!WAITING(s));
#ifdef OBSERVER
    WANT = (WANT >> 2) + 1 << 2 | wanted
#endif
}

/* What this take closes, should another have to resume it. */
inline intend(count) {
#ifdef BUG_NOT_ON_RECORD
    skip
#else
    CLOSED = (count) << 2 | PARITY(s)
#endif
}

/* The round that this taker has seen is closed: by it, or by the last writer wanted. */
inline closed(count) {
    p = PARITY(s);
    number = count;
    s = 0
}

inline close() {
    check_state();
    STATE = WORD(STEP(s) + 1, 1 - PARITY(s), 0, 0);
    check_closed();
    if
    :: COUNT(s) > wanted -> HAPPENS(a take gets more than it wants)
    :: else
    fi;
    closed(COUNT(s))
}

inline request() {
    assert(!WAITING(s));
    check_state();
    wanted_now = wanted;
    STATE = WORD(STEP(s), PARITY(s), 1, wanted - COUNT(s));
    check_state()
}

inline withdraw_request() {
    STATE = WORD(STEP(s), PARITY(s), 0, wanted - COUNT(s));
    check_state();
    wanted_now = 0;
#ifdef LEAVE
    assert(!nobody || tally[open_now] == 0);
    failed = failed || nobody;
    nobody = 0;
#endif
    s = 0
}

inline collect(i) {
    sum[i] = sum[i] | PAYLOAD(rank, BUFFER(RECORD(rank, p)), i)
}

inline collect_all() {
    do
    :: rank < WRITERS && USABLE(rank, p) ->
        collect(0); collect(1);
        weight = weight + WEIGHT(rank, p);
        total = total + ARRIVED(rank, p);
        rank++
    :: rank < WRITERS && !USABLE(rank, p) -> rank++
    :: rank == WRITERS -> break
    od
}

#ifdef BUG_DIVISOR
#define DIVISOR number
#else
#define DIVISOR total
#endif

/* The sum has everything that was admitted to the round, but what lost writers have not
 * left, and nothing else. */
inline check_sum() {
    assert(sum[0] == admitted[p] && sum[1] == admitted[p]);
    assert(weight == admitted[p]);
    assert(DIVISOR == number - lost_in[p] && number == tally[p]);
    assert(resumed || number >= wanted);
    assert(!(taken & admitted[p]));
    sum[0] = 0; sum[1] = 0; weight = 0; total = 0; rank = 0;
    read_now[p] = 0
}

#ifdef CRASH
#define NOTHING_LEFT (!admitted[p])
/* All gradients were lost: undo the step, and wait again. */
inline step_back() {
    HAPPENS(a round comes to nothing);
    check_state();
    STATE = STATE - (1 << 6);
    step_now--;
    check_state();
    tally[p] = 0; lost_in[p] = 0;
    CLOSED = CLOSED | 2;
    nothing = 1
}

inline go_on() {
    nothing = 0; resumed = 0; number = 0; p = 0;
    required = (required -> required : 1)
}
#else
#define NOTHING_LEFT false
#endif

/* From now on nobody resumes the round. */
inline hand_out() {
    assert(admitted[p]);
    taken = taken | admitted[p];
    admitted[p] = 0;
    tally[p] = 0; lost_in[p] = 0;
#ifndef BUG_RESUMED_TWICE
    CLOSED = CLOSED | 2;
#endif
    if
    :: resumed -> HAPPENS(a closed round is resumed)
    :: else
    fi
}

inline clear() {
    if
    :: NUMBER(RECORD(rank, p)) ->
        PAYLOAD(rank, BUFFER(RECORD(rank, p)), 0) = NOTHING;
        PAYLOAD(rank, BUFFER(RECORD(rank, p)), 1) = NOTHING
    :: else
    fi;
    RECORD(rank, p) = 0;
    /* Whatever it is: nobody reads it before it is written. */
    WEIGHT(rank, p) = 0;
    rank++
}

inline clear_all() {
    do
    :: rank < WRITERS -> clear()
    :: rank == WRITERS -> break
    od;
    rank = 0;
    CLOSED = 0
}

inline go() {
    LINE[me] = ABSENT;
    head = 0;
    required = 0; wanted = 0; number = 0; p = 0; resumed = 0; failed = 0; left = 0
}

#ifdef TAKER_CRASH
inline lose_taker() {
    LOST_TAKERS = LOST_TAKERS | 1 << me;
    head = (head == me + 1 -> 0 : head);
    HAPPENS(a taker is lost)
}
#define OR_DIE  :: me > 0 -> goto dead
#else
#define OR_DIE
#endif

proctype Taker(byte me) {
    short s;
    byte takes, required, wanted, ticket, passed, number, rank, total, left, weight;
    byte sum[2];
    bit p, resumed, reduced, left_waiting, failed, nobody, nothing;

begin:
    if
    :: takes == TAKES -> goto end
    :: d_step { takes > 0 && takes < TAKES -> takes++; LINE[me] = DRAWING }
    :: d_step { takes == 0 && first_draws == me ->
                first_draws++; takes++; LINE[me] = DRAWING }
    fi;
    if
    :: d_step { true -> ticket = TICKET; TICKET++ }
    OR_DIE
    fi;
    if
    :: d_step { true -> LINE[me] = ticket + 1; passed = 1 << me }
    OR_DIE
    fi;
end_line:
    do
    :: PASS(0)
#if TAKERS > 1
    :: PASS(1)
#endif
#if TAKERS > 2
    :: PASS(2)
#endif
    :: passed == ALL -> break
#ifdef TIMEOUTS
    :: d_step {
           passed != ALL ->
           LINE[me] = ABSENT;
           passed = 0; ticket = 0;
           HAPPENS(a take gives up in line)
       }
       goto begin
#endif
    OR_DIE
    od;

#ifdef FINE
    if
    :: d_step { true -> recall() }
    OR_DIE
    fi;
#endif
#ifdef TAKER_CRASH
    if
    :: left_waiting -> goto withdraw
    :: resumed && reduced -> passed = 0; goto clearing
    :: !left_waiting && !(resumed && reduced)
    fi;
#endif
fresh:
    if
    :: resumed -> passed = 0; goto await
    :: !resumed -> passed = 0; required = 1
#if NEED > 1
    :: !resumed -> passed = 0; required = 2
#endif
#if NEED > 2
    :: !resumed -> passed = 0; required = 3
#endif
    fi;

look:
#if defined(FINE) || defined(OBSERVER)
    if
    :: s = STATE
    OR_DIE
    fi;
    if
    :: d_step { true -> want() }
    fi;
    if
    :: d_step { COUNT(s) >= wanted -> intend(COUNT(s)) };
       if
       :: d_step { STATE == s -> close() } goto await
       :: d_step { STATE != s -> s = 0 } goto look
       OR_DIE
       fi
    :: d_step { COUNT(s) < wanted -> intend(wanted); announce() }
    fi;
    if
    :: d_step { STATE == s -> request() }
    :: d_step { STATE != s -> s = 0 } goto look
    OR_DIE
    fi;
#else
    if
    :: d_step { true -> want() }
    fi;
    if
    :: d_step { COUNT(STATE) >= wanted -> s = STATE; intend(COUNT(s)); close() }
       goto await
    :: d_step { COUNT(STATE) < wanted -> s = STATE; intend(wanted); request() }
    fi;
#endif

end_quorum:
    if
    :: d_step { PARITY(STATE) != PARITY(s) -> closed(wanted) } goto await
#ifdef TIMEOUTS
    :: failed = 1
#endif
    OR_DIE
#ifdef LEAVE
#ifdef BUG_LEFT_LATE
    :: PARITY(STATE) == PARITY(s) && COUNT(STATE) == wanted ->
       if
       :: d_step { LEFT == WRITERS -> nobody = 1 }
       :: LEFT != WRITERS -> goto end_quorum
       fi
    :: LEFT != left
#else
    :: d_step { LEFT != left || LEFT == WRITERS -> left = LEFT };
       if
       :: d_step { PARITY(STATE) != PARITY(s) -> closed(wanted) } goto await
       :: d_step {
              PARITY(STATE) == PARITY(s) ->
              nobody = (left == WRITERS && COUNT(STATE) == wanted)
          }
       fi
#endif
#endif
    fi;

#if defined(TIMEOUTS) || defined(LEAVE)
back:
    if
    :: d_step {
           PARITY(STATE) != PARITY(s) ->
           closed(wanted);
           failed = 0; nobody = 0;
           HAPPENS(a round is closed while its take gives up)
       }
       goto await
#ifdef FINE
    :: d_step { PARITY(STATE) == PARITY(s) -> s = STATE }
    OR_DIE
    fi;
    if
#ifdef BUG_BLIND_GIVE_UP
    :: d_step { true -> withdraw_request() }
#else
    :: d_step { STATE == s -> withdraw_request() }
    :: STATE != s -> goto back
    OR_DIE
#endif
#else
    :: d_step { PARITY(STATE) == PARITY(s) -> s = STATE; withdraw_request() }
#endif
    fi;
    if
    :: d_step { failed -> HAPPENS(a take gives up for want of gradients) } goto leave
#ifdef TIMEOUTS
    :: d_step {
           failed && COUNT(STATE) ->
           failed = 0; required = 1;
           HAPPENS(a take goes on with what there is)
       }
       goto look
#endif
#ifdef LEAVE
    :: d_step { !failed -> HAPPENS(a quorum shrinks) } goto look
#endif
    fi;
#endif

#ifdef TAKER_CRASH
/* The request of a lost taker. */
withdraw:
    if
    :: d_step {
           PARITY(STATE) == (CLOSED & 1) ->
           s = STATE;
           withdraw_request();
           HAPPENS(a request of a lost taker is withdrawn);
           left_waiting = 0; wanted = 0
       }
    :: d_step {
           PARITY(STATE) != (CLOSED & 1) ->
           left_waiting = 0; wanted = 0;
           recall()
       }
    fi;
    goto fresh;
#endif

await:
#ifdef BUG_EARLY_READ
    if
    :: d_step { true -> total = number - ALL_ARRIVED(p) }
    fi;
#endif
    if
    :: d_step { ALL_ARRIVED(p) == number -> read_now[p] = 1; total = 0 }
#ifdef CRASH
    :: !ANY_OPEN(p) && ALL_ARRIVED(p) != number;
       d_step {
#ifdef BUG_EARLY_READ
           assert(total == lost_in[p]);
           total = 0;
#endif
           read_now[p] = 1;
           if
           :: ALL_ARRIVED(p) != number -> HAPPENS(a gradient is lost)
           :: else
           fi
       }
#endif
#ifdef TIMEOUTS
    :: d_step { true -> total = 0; HAPPENS(a take gives up after closing) } goto leave
#endif
    OR_DIE
    fi;
#ifdef FINE
    do
    :: d_step { rank < WRITERS && !USABLE(rank, p) -> rank++ }
    :: d_step {
           rank < WRITERS && USABLE(rank, p) ->
           total = total + ARRIVED(rank, p);
           weight = weight + WEIGHT(rank, p)
       };
       d_step { collect(0) };
       d_step { collect(1); rank++ }
#ifdef CRASH
    :: d_step { rank == WRITERS && NOTHING_LEFT -> check_sum(); step_back() } break
#endif
    :: d_step { rank == WRITERS && !NOTHING_LEFT -> check_sum(); hand_out() } break
#ifdef TIMEOUTS
    :: d_step {
           rank == WRITERS && !NOTHING_LEFT ->
           check_sum();
           HAPPENS(the caller fails)
       }
       goto leave
#endif
    OR_DIE
    od;
#ifdef BUG_LEAVE_EARLY
    if
    :: d_step { true -> LINE[me] = ABSENT; head = 0 }
    fi;
#endif
clearing:
    do
    :: d_step { rank < WRITERS -> clear() }
    :: d_step { rank == WRITERS -> rank = 0 } break
    OR_DIE
    od;
    CLOSED = 0;
    if
#ifdef CRASH
    :: d_step { nothing -> go_on() } goto look
#endif
#ifdef TAKER_CRASH
    :: d_step {
           reduced ->
           HAPPENS(a take of a lost taker is completed);
           reduced = 0; resumed = 0; p = 0; number = 0
       }
       goto fresh
#endif
    :: !nothing && !reduced
    fi;
#else
    if
#ifdef CRASH
    :: d_step {
           NOTHING_LEFT ->
           collect_all();
           check_sum();
           step_back();
           clear_all();
           go_on()
       }
       goto look
#endif
    :: d_step {
           !NOTHING_LEFT -> collect_all(); check_sum(); hand_out(); clear_all()
       }
#ifdef TIMEOUTS
    :: d_step {
           !NOTHING_LEFT ->
           collect_all();
           check_sum();
           HAPPENS(the caller fails)
       }
#endif
    fi;
#endif
leave:
    if
    :: d_step { true -> go() } goto begin
    OR_DIE
    fi;
#ifdef TAKER_CRASH
dead:
    if
    :: d_step {
           true ->
           lose_taker();
           s = 0; takes = 0; required = 0; wanted = 0; ticket = 0; passed = 0;
           number = 0; rank = 0; total = 0; left = 0; weight = 0; sum[0] = 0; sum[1] = 0;
           p = 0; resumed = 0; reduced = 0; left_waiting = 0; failed = 0; nobody = 0;
           nothing = 0
       }
    fi;
#endif
end:
    skip
}

#ifdef BUG_LOST_MEANWHILE
/* Says that a taker is lost, which goes on: an agent takes for it. */
proctype Finder() {
    byte me = 1;
    if
    :: d_step { true -> lose_taker() }
    fi
}
#endif

#ifdef SETTER
inline set() {
    check_state();
    step_now = step;
    STATE = WORD(step, PARITY(s), WAITING(s), COUNT(s));
    check_state();
    step = step + 2;
    s = 0
}

proctype Setter() {
    short s;
    byte step;

    do
#ifndef FINE
    :: d_step { step <= 2 -> s = STATE; set() }
#else
    :: d_step { step <= 2 -> s = STATE };
       if
       :: d_step { STATE == s -> set() }
       :: d_step { STATE != s -> s = 0 }
       fi
#endif
    :: step > 2 -> break
    od
}
#endif

#ifdef OBSERVER
proctype Observer() {
    short s;
    byte seen, truth;

    do
    :: seen = WANT;
       d_step { s = STATE; truth = tally[open_now] };
       if
       :: d_step { !WAITING(s) -> assert(COUNT(s) == truth) } break
#ifndef BUG_WANT_ONCE
       :: d_step { WAITING(s) && WANT != seen -> s = 0; truth = 0 }
       :: d_step { WAITING(s) && WANT == seen ->
#else
       :: d_step { WAITING(s) ->
#endif
                   assert((seen & 3) - COUNT(s) == truth) }
          break
       fi
    od
}
#endif

/* The round of this parity has what was admitted to it, and nothing else. */
inline check_round(parity) {
    found = 0; number = 0; rank = 0;
    do
    :: rank < WRITERS && !USABLE(rank, parity) -> rank++
    :: rank < WRITERS && USABLE(rank, parity) ->
        assert(!(found & PAYLOAD(rank, BUFFER(RECORD(rank, parity)), 0)));
        found = found | PAYLOAD(rank, BUFFER(RECORD(rank, parity)), 0);
        number = number + ARRIVED(rank, parity);
        rank++
    :: rank == WRITERS -> break
    od;
    assert(found == admitted[parity]);
    assert(number == tally[parity] - lost_in[parity])
}

/* No taker is in line. */
inline check_line() {
    rank = 0;
    do
    :: rank < TAKERS ->
        assert(LINE[rank] == ABSENT || LOST_TAKERS >> rank & 1);
        rank++
    :: rank == TAKERS -> break
    od
}

proctype Monitor() {
    byte rank, found, number;

    timeout;
    d_step {
        check_state();
        if
        :: head ->
            assert(WAITING(STATE) && COUNT(STATE) > 0);
            assert(LEFT < WRITERS)
        :: !head -> assert(!WAITING(STATE) || LOST_TAKERS); check_line()
        fi;
        assert(!(taken & (admitted[0] | admitted[1])) && !(admitted[0] & admitted[1]));
        assert(accepted == (taken | admitted[0] | admitted[1]));
        check_round(open_now);
        if
        :: CLOSED & 2 -> assert(LOST_TAKERS)
        :: else ->
            check_round(1 - open_now);
            number = tally[1 - open_now];
            assert(!number || CLOSED == (number << 2 | 1 - open_now))
        fi
    }
}

init {
    byte i;
    atomic {
        for (i : 0 .. WRITERS - 1) { run Writer(i) }
        for (i : 0 .. TAKERS - 1) { run Taker(i) }
#ifdef SETTER
        run Setter();
#endif
#ifdef OBSERVER
        run Observer();
#endif
#ifdef BUG_LOST_MEANWHILE
        run Finder();
#endif
        run Monitor()
    }
}
