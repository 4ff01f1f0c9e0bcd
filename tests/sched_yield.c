/* sched_yield for tests, in which ranks share cores: loaded before the C library.

MPI calls it in a loop while it waits.  With the scheduler of Linux, each call puts the
thread behind all others of its core that want to run, by a whole time slice.  A rank that
waits calls it thousands of times and gets its core back late, when its message has long
arrived.  Four ranks on two cores need half of the time if they sleep instead: for 1 ns,
which the kernel makes about 50 us.  A signal may end the sleep, which is no failure. */

#include <time.h>

int sched_yield(void)
{
    const struct timespec shortest = {0, 1};
    nanosleep(&shortest, 0);
    return 0;
}
