/*
 * Reductions in the memory of a node, of whose ranks some may die.
 * In hpcaccum/reducer: one_shot.py, two_shot.py.
 *
 * tests/system/test_model.py runs it through Spin, with the macros
 *
 *   RANKS       ranks; rank 0, without which the job ends, does not die
 *   CALLS       reductions, one after the other
 *   ONE_SHOT    each rank sums all; otherwise each rank sums a stripe for all
 *   BUG_...     one planted bug each: search for the name
 *
 * What is proven: the assertions. All ranks that complete a call count the inputs of the
 * same ranks in it, each input that they count is that of this call, and the divisor is
 * their number. A rank that lives completes all calls.
 *
 * Abstractions: an input is the number of its call, and a stripe of the results is a
 * number and the set of the ranks that it counts; both are TORN while they are written.
 * The weight of a rank is like its input: it is written before the same word, and read
 * after it. Buckets are not modelled: ranks contribute all of them at once. Each rank learns of a
 * death some time later, and no rank learns of one that does not happen. Memory is
 * sequentially consistent: see accumulator.pml. A look at the words of all ranks is one
 * step: those of the dead do not change, and the others only grow.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef CALLS
#define CALLS 2
#endif
#define TORN 255

#define HAPPENS(what) \
    c_code { static int before; if (!before++) printf("happens: %s\n", #what); }

#ifdef ONE_SHOT
#ifdef BUG_ONE_COPY
#define COPY(rank) rank
#else
#define COPY(rank) ((call & 1) * RANKS + (rank))
#endif
#else
#define COPY(rank) rank
#endif
#define SEEN(rank) (ARRIVED[COPY(rank)] >= call)
byte input[2 * RANKS];
byte ARRIVED[2 * RANKS];
byte stripe[RANKS];
byte SUMMED[RANKS];
byte DEAD;
byte KNOWN[RANKS];              /* the dead, as each rank knows them */
/* Ghosts. */
byte counted[CALLS + 1];        /* 128 | the ranks that a call counts */
byte size[CALLS + 1];           /* their number */
byte stood_in;
byte finished;

#define IN(rank, set) ((set) >> (rank) & 1)
#define GONE(rank) IN(rank, KNOWN[me])
#define HERE(rank) (SEEN(rank) || GONE(rank))
#define DONE(rank) (SUMMED[rank] >= call)
#if RANKS == 2
#define ALL(what) (what(0) && what(1))
#define FIRST_AFTER(rank) (me != (rank))
#else
#define ALL(what) (what(0) && what(1) && what(2))
#define BEFORE ((me + 2) % 3)
#define FIRST_AFTER(rank) ((rank) == BEFORE || (rank) != me && GONE(BEFORE))
#endif
#ifdef BUG_ALL_STAND_IN
#define MINE(rank) (GONE(rank) && !DONE(rank))
#else
#define MINE(rank) (GONE(rank) && !DONE(rank) && FIRST_AFTER(rank))
#endif

#define MAY_DIE if :: true :: me -> goto dead fi

/* Which inputs are here: in the code, those of `counted`. */
inline look(set, number) {
    d_step {
        set = 0; number = 0; i = 0;
        do
#ifdef BUG_LOST_NOT_COUNTED
        :: i < RANKS && SEEN(i) && !GONE(i) -> set = set | 1 << i; number++; i++
        :: i < RANKS && !(SEEN(i) && !GONE(i)) -> i++
#else
        :: i < RANKS && SEEN(i) -> set = set | 1 << i; number++; i++
        :: i < RANKS && !SEEN(i) -> i++
#endif
        :: i == RANKS -> break
        od;
        i = 0
    }
}

/* Read the inputs of a set, and compare it with what other ranks have counted. */
inline read_inputs(set, number) {
    do
    :: i < RANKS ->
       if
       :: IN(i, set) -> assert(input[COPY(i)] == call)
       :: else
       fi;
       i++
    :: i == RANKS -> break
    od;
    skip;
    d_step {
        i = 0;
        assert(!counted[call] || counted[call] == (128 | set));
        counted[call] = 128 | set;
#ifdef BUG_DIVISOR
        number = RANKS;
#endif
        if
        :: set & DEAD -> HAPPENS(an input of a rank that has died counts)
        :: else
        fi;
        if
        :: number < RANKS -> HAPPENS(an input of a rank that has died is left out)
        :: else
        fi;
        do
        :: i < RANKS -> size[call] = size[call] + IN(i, set); i++
        :: i == RANKS -> break
        od;
        assert(number == size[call]);
        size[call] = 0; i = 0
    }
}

/* Sum a stripe. In the code: NodeSum._sum. */
inline sum(part) {
    stripe[part] = TORN;
    MAY_DIE;
    look(set, number);
    read_inputs(set, number);
    MAY_DIE;
    stripe[part] = call << 3 | set;
    MAY_DIE;
    SUMMED[part] = call;
    MAY_DIE
}

proctype Rank(byte me) {
    byte call = 1, set, number, i, part;

    do
    :: call <= CALLS ->
       input[COPY(me)] = TORN;
       MAY_DIE;
       input[COPY(me)] = call;
       MAY_DIE;
       ARRIVED[COPY(me)] = call;
       MAY_DIE;
#ifdef BUG_EARLY_LOOK
       look(set, number);
#endif
       ALL(HERE);
#ifdef ONE_SHOT
#ifndef BUG_EARLY_LOOK
       look(set, number);
#endif
       read_inputs(set, number);
#else
       sum(me);
       part = 0;
       do
       :: ALL(DONE) -> break
#ifndef BUG_NOBODY_STANDS_IN
       :: part < RANKS && MINE(part) ->
          d_step {
              if
              :: stood_in & DEAD -> HAPPENS(a rank stands in for one that stood in)
              :: else
              fi;
              stood_in = stood_in | 1 << me;
              HAPPENS(a rank stands in for another)
          };
          sum(part)
       :: part < RANKS && !MINE(part) -> part++
       :: part == RANKS && !ALL(DONE) -> part = 0
#endif
       od;
       part = 0;
       do
       :: part < RANKS ->
          assert(stripe[part] == (call << 3 | counted[call] & 7));
          part++
       :: part == RANKS -> break
       od;
#endif
       skip;
       d_step { set = 0; number = 0; part = 0; call++ };
       MAY_DIE
    :: call > CALLS -> break
    od;
    goto end;
dead:
    DEAD = DEAD | 1 << me;
end:
    finished++
}

/* In the code: the heartbeat of each rank. */
proctype Heartbeat(byte me) {
    do
#ifdef BUG_TAKEN_FOR_DEAD
    :: !GONE(RANKS - 1) -> KNOWN[me] = KNOWN[me] | 1 << (RANKS - 1)
#endif
    :: d_step { DEAD & ~KNOWN[me] & 2 -> KNOWN[me] = KNOWN[me] | 2 }
#if RANKS > 2
    :: d_step { DEAD & ~KNOWN[me] & 4 -> KNOWN[me] = KNOWN[me] | 4 }
#endif
    :: finished == RANKS -> break
    od
}

proctype Monitor() {
    timeout -> assert(finished == RANKS)
}

init {
    atomic {
        byte i;
        for (i : 0 .. RANKS - 1) {
            run Rank(i);
            run Heartbeat(i)
        };
        run Monitor()
    }
}
