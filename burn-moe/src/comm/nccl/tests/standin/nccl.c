/*
 * Stands in for NCCL between ranks that are threads of a process: a communicator's groups run one after the other, and what
 * two ranks send each other is matched by order. Everything moves when someone asks for errors, and is said to be in
 * progress two times out of three.
 */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { BYTES = 1, MAGIC = 0xcafebeef };

typedef struct { char bytes[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;
typedef struct { long begun, done; } Stream;

typedef struct Transfer {
    int receives, peer, done;
    char *address;
    size_t bytes;
    struct Transfer *next;
} Transfer;

typedef struct Group {
    Transfer *transfers;
    Stream *stream;
    struct Group *next;
} Group;

typedef struct Comm {
    Id id;
    int rank, ranks, asked;
    Result failure;
    Group *groups, **end;
    struct Comm *next;
} Comm;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Comm *comms;
static char ids;

/* The group that the thread is putting together. */
static __thread Group *open_group;
static __thread Transfer **open_end;
static __thread Comm *open_comm;

static Comm *member(const Comm *comm, int rank) {
    for (Comm *it = comms; it; it = it->next)
        if (it->rank == rank && !memcmp(&it->id, &comm->id, sizeof it->id)) return it;
    return NULL;
}

/* The first transfer of the running group with `peer` in that direction that is not done. */
static Transfer *first(Comm *comm, int receives, int peer) {
    if (!comm || !comm->groups) return NULL;
    for (Transfer *it = comm->groups->transfers; it; it = it->next)
        if (it->receives == receives && it->peer == peer && !it->done) return it;
    return NULL;
}

static void move(Comm *comm) {
    for (int peer = 0; peer < comm->ranks; peer++)
        for (;;) {
            Transfer *to = first(comm, 1, peer);
            Transfer *from = first(member(comm, peer), 0, comm->rank);
            if (!to || !from) break;
            if (to->bytes != from->bytes) comm->failure = INTERNAL;
            memmove(to->address, from->address, to->bytes < from->bytes ? to->bytes : from->bytes);
            to->done = from->done = 1;
        }
}

static void finish(Comm *comm) {
    for (Group *group; (group = comm->groups);) {
        for (Transfer *it = group->transfers; it; it = it->next)
            if (!it->done) return;
        comm->groups = group->next;
        if (!comm->groups) comm->end = &comm->groups;
        __atomic_add_fetch(&group->stream->done, 1, __ATOMIC_SEQ_CST);
    }
}

static void leave(Comm *comm) {
    pthread_mutex_lock(&lock);
    for (Comm **it = &comms; *it; it = &(*it)->next)
        if (*it == comm) { *it = comm->next; break; }
    pthread_mutex_unlock(&lock);
}

Result ncclGetVersion(int *version) {
    const char *number = getenv("STANDIN_NCCL");
    *version = number ? atoi(number) : 22803;
    return SUCCESS;
}

Result ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    pthread_mutex_lock(&lock);
    id->bytes[0] = ++ids;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, const Config *config) {
    if (config->magic != MAGIC || config->blocking) return INVALID_ARGUMENT;
    *comm = calloc(1, sizeof **comm);
    (*comm)->id = id;
    (*comm)->rank = rank;
    (*comm)->ranks = ranks;
    (*comm)->end = &(*comm)->groups;
    pthread_mutex_lock(&lock);
    (*comm)->next = comms;
    comms = *comm;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}

Result ncclCommGetAsyncError(Comm *comm, Result *state) {
    pthread_mutex_lock(&lock);
    for (Comm *it = comms; it; it = it->next) move(it);
    for (Comm *it = comms; it; it = it->next) finish(it);
    int missing = 0;
    for (int rank = 0; rank < comm->ranks; rank++) missing += !member(comm, rank);
    int busy = missing || comm->asked++ % 3 != 2;
    *state = comm->failure ? comm->failure : busy ? IN_PROGRESS : SUCCESS;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

Result ncclCommAbort(Comm *comm) { leave(comm); return SUCCESS; }
Result ncclCommFinalize(Comm *comm) { return comm->groups ? INVALID_USAGE : IN_PROGRESS; }
/* The others still ask for it. */
Result ncclCommDestroy(Comm *comm) { return SUCCESS; }

Result ncclGroupStart(void) {
    open_group = calloc(1, sizeof *open_group);
    open_end = &open_group->transfers;
    open_comm = NULL;
    return SUCCESS;
}

static Result add(int receives, void *address, size_t bytes, int type, int peer, Comm *comm, Stream *stream) {
    if (type != BYTES || peer < 0 || peer >= comm->ranks || !bytes) return INVALID_ARGUMENT;
    Transfer *transfer = calloc(1, sizeof *transfer);
    transfer->receives = receives;
    transfer->peer = peer;
    transfer->address = address;
    transfer->bytes = bytes;
    *open_end = transfer;
    open_end = &transfer->next;
    open_comm = comm;
    open_group->stream = stream;
    return SUCCESS;
}

Result ncclSend(void *address, size_t bytes, int type, int peer, Comm *comm, Stream *stream) {
    return add(0, address, bytes, type, peer, comm, stream);
}

Result ncclRecv(void *address, size_t bytes, int type, int peer, Comm *comm, Stream *stream) {
    return add(1, address, bytes, type, peer, comm, stream);
}

Result ncclGroupEnd(void) {
    if (!open_comm) return INVALID_USAGE;
    pthread_mutex_lock(&lock);
    __atomic_add_fetch(&open_group->stream->begun, 1, __ATOMIC_SEQ_CST);
    *open_comm->end = open_group;
    open_comm->end = &open_group->next;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}

const char *ncclGetErrorString(Result result) { return result == INTERNAL ? "internal error" : "some error"; }
const char *ncclGetLastError(Comm *comm) { return "the stand-in's last words"; }
