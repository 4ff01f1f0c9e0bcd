/*
 * Updates that the ranks of a node make together, of which some may die.
 * In hpcaccum/server: node_update.py.
 *
 * tests/system/test_model.py runs it through Spin, with the macros
 *
 *   HELPERS     ranks that help the root, whose own worker has the number 0
 *   UPDATES     updates, one after the other
 *   BUG_...     one planted bug each: search for the name
 *
 * A helper may die before any step. What is proven: the assertions. A chunk is changed
 * from the values of the update before, and after each update all chunks, slots and the
 * copy have its number. So no chunk is changed twice, or from a torn value.
 *
 * Abstractions: a chunk of the center, of the slot, and of a copy is the number of its
 * update, and TORN while it is changed. There are two pieces of two chunks. Memory is
 * sequentially consistent: see accumulator.pml. A word is read or written in one step.
 */

#ifndef HELPERS
#define HELPERS 1
#endif
#ifndef UPDATES
#define UPDATES 2
#endif
#define PIECES 2
#define CHUNKS 2
#define ALL (PIECES * CHUNKS)
#define WORKERS (HELPERS + 1)
#define AT(i) (piece * CHUNKS + (i))
#define TORN 255
/* The slots of two chunks differ. */
#define IN_SLOT(chunk, number) (16 * (chunk) + (number))
#define DONE_ALL 7

#define HAPPENS(what) \
    c_code { static int before; if (!before++) printf("happens: %s\n", #what); }

byte center[ALL], slot[ALL];
byte copy[2 * ALL];
byte saved[WORKERS * 2];
#ifdef BUG_ONE_ROOM
#define SAVED(worker, chunk) saved[(worker) * 2]
#else
#define SAVED(worker, chunk) saved[(worker) * 2 + ((chunk) & 1)]
#endif
#define COPY(which, chunk) copy[(which) * ALL + (chunk)]
/* The word of the next piece; those of pieces; and of workers. */
byte number, next = PIECES, done;
byte made[PIECES], by[PIECES], begun[PIECES];
bit busy[WORKERS];
byte LOST;
bit over;
#define WRITING (number & 1)
#define IS_LOST(worker) (LOST >> (worker) & 1)

/* All workers but those of the root. */
#define MAY_DIE(who) if :: true :: who -> goto dead fi

/* One chunk, of which nobody else has the piece. In the code: _work_on_chunk. */
inline change(chunk, who, to) {
    d_step {
        value = center[chunk];
        momentum = slot[chunk];
        assert(value == to - 1 && momentum == IN_SLOT(chunk, to - 1))
    };
    slot[chunk] = TORN;
    MAY_DIE(who);
    d_step { slot[chunk] = momentum + 1; center[chunk] = TORN };
    MAY_DIE(who);
    center[chunk] = value + 1;
    MAY_DIE(who);
    d_step { COPY(to & 1, chunk) = value + 1; value = 0; momentum = 0 };
    MAY_DIE(who)
}

inline save(who, i) {
    SAVED(who, i) = slot[AT(i)];
    MAY_DIE(who)
}

inline mark(who, i) {
    d_step { made[piece] = mine; by[piece] = who; begun[piece] = i };
    MAY_DIE(who)
}

inline chunk_of_piece(who, i) {
#ifdef BUG_NOT_SAVED
    mark(who, i);
    change(AT(i), who, mine);
    save(who, i);
#else
    save(who, i);
    mark(who, i);
    change(AT(i), who, mine);
#endif
    skip
}

/* In the code: _work. */
inline work(who) {
#ifndef BUG_BUSY_LATE
    busy[who] = 1;
    MAY_DIE(who);
#endif
    do
    :: d_step { next < PIECES -> piece = next; mine = number; next++ };
       MAY_DIE(who);
#ifdef BUG_BUSY_LATE
       busy[who] = 1;
       MAY_DIE(who);
#endif
#ifdef BUG_BUSY_EARLY
       busy[who] = 0;
       MAY_DIE(who);
#endif
       chunk_of_piece(who, 0);
       chunk_of_piece(who, 1);
       mark(who, DONE_ALL);
       done++;
       d_step { piece = 0; mine = 0 };
       MAY_DIE(who)
    :: next >= PIECES -> break
    od;
    busy[who] = 0;
    MAY_DIE(who)
}

#if HELPERS > 1
#define OTHERS_WORK (busy[0] || busy[1] && !IS_LOST(1) || busy[2] && !IS_LOST(2))
#else
#define OTHERS_WORK (busy[0] || busy[1] && !IS_LOST(1))
#endif

/* What a rank that has died has not done of a piece. In the code: _do_rest. */
inline do_rest() {
    if
#ifdef BUG_OLD_NUMBER
    :: true ->
#else
    :: made[piece] == number ->
#endif
       if
       :: begun[piece] == DONE_ALL -> HAPPENS(a lost rank has done a piece);
          goto next_piece
       :: else
       fi;
       d_step {
           i = begun[piece];
           HAPPENS(a chunk is made again);
           center[AT(i)] = COPY(1 - WRITING, AT(i));
           slot[AT(i)] = SAVED(by[piece], i)
       }
    :: made[piece] != number -> HAPPENS(a piece was not begun)
    fi;
    /* Nobody else works now. */
    d_step {
        do
        :: i < CHUNKS ->
           assert(center[AT(i)] == number - 1);
           assert(slot[AT(i)] == IN_SLOT(AT(i), number - 1));
           center[AT(i)] = number;
           slot[AT(i)] = IN_SLOT(AT(i), number);
           COPY(WRITING, AT(i)) = number;
           i++
        :: i == CHUNKS -> break
        od
    };
next_piece:
    skip;
    d_step { i = 0; piece++ }
}

active proctype Root() {
    byte piece, i;

    slot[3];
    do
    :: number < UPDATES ->
       /* In the code: _announce. */
       d_step { done = 0; number++; next = 0 };
       /* Its own worker has ended: all pieces are taken. */
       next >= PIECES && !busy[0];
       if
       :: done == PIECES
       :: LOST && !OTHERS_WORK && done != PIECES ->
          piece = 0;
          do
          :: piece < PIECES -> do_rest()
          :: piece == PIECES -> break
          od;
          piece = 0
       fi;
       d_step {
           do
           :: i < ALL ->
              assert(center[i] == number && slot[i] == IN_SLOT(i, number));
              assert(COPY(WRITING, i) == number);
              i++
           :: i == ALL -> break
           od;
           i = 0
       }
    :: number == UPDATES -> break
    od;
    over = 1
}

proctype Worker(byte me) {
    byte piece, mine, value, momentum;

    do
    :: !over && next < PIECES -> work(me)
    :: over -> goto end
    od;
dead:
    /* It is found to be lost some time later. */
    LOST = LOST | 1 << me;
end:
    skip
}

init {
    atomic {
        slot[1] = IN_SLOT(1, 0);
        slot[2] = IN_SLOT(2, 0);
        slot[3] = IN_SLOT(3, 0);
        run Worker(0);
        run Worker(1)
#if HELPERS > 1
        ; run Worker(2)
#endif
    }
}
