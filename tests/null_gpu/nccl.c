/* NCCL between processes of one machine, through a shared file: what is gathered or broadcast
 * arrives; a reduction gives the values of its first rank to all, since numbers mean nothing. Each
 * call ends once all ranks of the group have made it. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SLOT = 1 << 26, MOST_RANKS = 16, MOST_IN_A_GROUP = 1024 };
typedef struct { pthread_barrier_t all; int color[MOST_RANKS], key[MOST_RANKS]; } Head;
typedef struct { int ranks, rank, splits; char path[160]; Head *head; char *slots; } Ranks;
typedef struct { char bytes[128]; } Id;
typedef struct { Ranks *group; char *buffer; size_t bytes; int peer, sends; } Message;
static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* bytes, by ncclDataType_t */
static __thread int depth, waiting;
static __thread Message messages[MOST_IN_A_GROUP];

static void meet(Ranks *g) { if (g->ranks > 1) pthread_barrier_wait(&g->head->all); }
static char *slot(Ranks *g, int rank) { return g->slots + (size_t)rank * SLOT; }

/* Join the group of a path; the first rank makes its file, and removes the name once all have it. */
static int join(Ranks **to, const char *path, int ranks, int rank) {
  Ranks *g = calloc(1, sizeof *g);
  size_t bytes = 4096 + (size_t)ranks * SLOT;
  char unfinished[168];
  int file;
  *to = g;
  g->ranks = ranks, g->rank = rank;
  if (ranks == 1) return 0;
  snprintf(g->path, sizeof g->path, "%s", path);
  snprintf(unfinished, sizeof unfinished, "%s.part", path);
  if (rank == 0) {
    file = open(unfinished, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || ftruncate(file, bytes)) return 3;
  } else while ((file = open(path, O_RDWR)) < 0) usleep(1000);
  g->head = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  g->slots = (char *)g->head + 4096;
  close(file);
  if (rank == 0) {
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&g->head->all, &shared, ranks);
    rename(unfinished, path);
  }
  meet(g);
  if (rank == 0) unlink(path);
  return 0;
}
int ncclGetUniqueId(Id *id) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%s/null-gpu-%d-%ld", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", getpid(), now.tv_sec * 1000000000L + now.tv_nsec);
  return 0;
}
int ncclCommInitRank(Ranks **g, int ranks, Id id, int rank) { return join(g, id.bytes, ranks, rank); }
int ncclCommInitRankConfig(Ranks **g, int ranks, Id id, int rank, void *c) { return join(g, id.bytes, ranks, rank); }
int ncclCommInitRankScalable(Ranks **g, int ranks, int rank, int n, Id *id, void *c) { return join(g, id->bytes, ranks, rank); }
int ncclCommSplit(Ranks *g, int color, int key, Ranks **to, void *c) {
  char path[160];
  int ranks = 0, rank = 0;
  if (g->ranks == 1) return join(to, "", 1, 0);
  g->head->color[g->rank] = color, g->head->key[g->rank] = key;
  meet(g);
  for (int i = 0; i < g->ranks; i++)
    if (g->head->color[i] == color) {
      ranks++;
      rank += g->head->key[i] < key || (g->head->key[i] == key && i < g->rank);
    }
  meet(g);
  snprintf(path, sizeof path, "%.120s-%d-%d", g->path, ++g->splits, color);
  *to = NULL;
  return color < 0 ? 0 : join(to, path, ranks, rank);
}
int ncclGetVersion(int *v) { *v = 22809; return 0; }
int ncclCommGetAsyncError(Ranks *g, int *e) { *e = 0; return 0; }
int ncclCommCount(Ranks *g, int *n) { *n = g->ranks; return 0; }
int ncclCommUserRank(Ranks *g, int *n) { *n = g->rank; return 0; }
int ncclCommCuDevice(Ranks *g, int *d) { *d = g->rank; return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *s, int t, int res, void *g) { *op = 0; return 0; }
const char *ncclGetErrorString(int e) { return e ? "null GPU: no shared file" : "no error"; }
const char *ncclGetLastError(void *g) { return "null GPU"; }

/* Show `bytes` of each rank, piece by piece, and copy those of rank `from` (-1: of all, one after
 * the other) from the place `at` on to `to`. */
static int exchange(Ranks *g, const char *own, size_t bytes, char *to, size_t each, int from, size_t at) {
  if (g->ranks == 1) { if (own + at != to) memmove(to, own + at, each); return 0; }
  for (size_t done = 0; done < bytes; done += SLOT) {
    size_t piece = bytes - done < SLOT ? bytes - done : SLOT;
    memcpy(slot(g, g->rank), own + done, piece);
    meet(g);
    for (int rank = 0; rank < g->ranks; rank++)
      if (from < 0) memcpy(to + rank * each + done, slot(g, rank), piece);
      else if (rank == from && done < at + each && done + piece > at) {
        size_t begin = at > done ? at : done, end = at + each < done + piece ? at + each : done + piece;
        memcpy(to + begin - at, slot(g, rank) + begin - done, end - begin);
      }
    meet(g);
  }
  return 0;
}
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, Ranks *g, void *st) { n *= WIDTH[t]; return exchange(g, s, n, r, n, 0, 0); }
int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, Ranks *g, void *st) { n *= WIDTH[t]; return exchange(g, s, n, r ? r : (void *)s, n, g->rank == root ? 0 : g->rank, 0); }
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, Ranks *g, void *st) { n *= WIDTH[t]; return exchange(g, g->rank == root ? s : r, n, r, n, root, 0); }
int ncclBcast(void *s, size_t n, int t, int root, Ranks *g, void *st) { n *= WIDTH[t]; return exchange(g, s, n, s, n, root, 0); }
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, Ranks *g, void *st) { n *= WIDTH[t]; return exchange(g, s, n * g->ranks, r, n, 0, n * g->rank); }
int ncclAllGather(const void *s, void *r, size_t n, int t, Ranks *g, void *st) { n *= WIDTH[t]; return exchange(g, s, n, r, n, -1, 0); }

/* Messages of a group: all ranks send, meet, and receive. */
static int deliver(void) {
  Ranks *g = waiting ? messages[0].group : NULL;
  size_t part = SLOT / MOST_RANKS;
  for (int receives = 0; receives < 2 && g; receives++) {
    for (int i = 0; i < waiting; i++) {
      Message *m = &messages[i];
      char *mail = m->sends ? slot(g, g->rank) + m->peer * part : slot(g, m->peer) + g->rank * part;
      if (m->bytes > part || m->group != g) return 5;
      if (g->ranks > 1 && m->sends != receives) m->sends ? memcpy(mail, m->buffer, m->bytes) : memcpy(m->buffer, mail, m->bytes);
    }
    meet(g);
  }
  waiting = 0;
  return 0;
}
static int message(Ranks *g, void *buffer, size_t bytes, int peer, int sends) {
  if (waiting == MOST_IN_A_GROUP) return 5;
  messages[waiting++] = (Message){g, buffer, bytes, peer, sends};
  return depth ? 0 : deliver();
}
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) { return --depth ? 0 : deliver(); }
int ncclSend(const void *s, size_t n, int t, int peer, Ranks *g, void *st) { return message(g, (void *)s, n * WIDTH[t], peer, 1); }
int ncclRecv(void *r, size_t n, int t, int peer, Ranks *g, void *st) { return message(g, r, n * WIDTH[t], peer, 0); }
int ncclAlltoAll(const void *s, void *r, size_t n, int t, Ranks *g, void *st) {
  n *= WIDTH[t];
  depth++;
  for (int i = 0; i < g->ranks; i++) {
    message(g, (char *)s + i * n, n, i, 1);
    message(g, (char *)r + i * n, n, i, 0);
  }
  return ncclGroupEnd();
}
