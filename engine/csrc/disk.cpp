// Byte ranges of files on several drives, read and written by threads of their own.
//
// The files are one range of bytes, striped: stripe s is stripe s / N of file s % N. Each drive has
// its threads and a queue of the requests that want something of it; a thread cuts a piece of at
// most a stripe off the first of them and puts it behind the others, so that those under way share
// the drive. Invariant: a request returns when no thread touches its memory any more, and either
// all of its bytes were moved or there is a failure, after which nothing is ever moved again.
//
// Threads and preads, not io_uring: the default seccomp profiles of containers forbid that, and at
// these sizes a thread a request is as fast. `python -m sweeps.ceilings --disk` measures both ends.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr int64_t PAGE = 4096;
constexpr int BUSY_TRIES = 10000;    // of a millisecond, while the file says EAGAIN
constexpr int STUCK_TRIES = 3;       // in a row that move less than a page
constexpr int32_t TRUNCATED = -1, CLOSED = -2;  // failures that no errno says

enum Kind : int32_t { READ, WRITE, SYNC };

// Mirrored in disk.py. code: 0 for none, an errno, TRUNCATED or CLOSED.
struct Failure {
  int32_t code, drive, kind;
  int64_t offset, bytes;  // of the drive's file
};

// What tests inject: the attempts after the next `after`, `times` of them, go wrong.
enum Wrong : int32_t { NOTHING, FAILS, MOVES_LESS, IS_LATE };
struct Fault {
  int32_t wrong;
  int64_t value;  // an errno; the most bytes that are moved; microseconds
  int64_t after, times;
};

struct Request {
  Kind kind;
  char *memory;
  int64_t offset, end;
  int64_t left;  // pieces that are neither moved nor given up
  std::condition_variable done;
};

struct Piece {
  Kind kind;
  char *memory;
  int64_t offset, size;  // of the drive's file
};

// What a request still wants of one drive: every N-th stripe from `stripe` to before `end`.
struct Share {
  Request *of;
  int64_t stripe, end;
};

struct Drive {
  int fd;
  int64_t bytes;
  bool direct;
  std::deque<Share> shares;
  std::condition_variable wake;
};

struct Pool {
  int64_t stripe;
  std::vector<std::unique_ptr<Drive>> drives;
  std::vector<std::thread> threads;
  std::mutex mutex;  // of all that follows, and of the drives' shares
  bool stopping = false;
  Failure failure{};
  Fault fault{};

  Fault injected() {
    std::lock_guard<std::mutex> lock(mutex);
    if (fault.wrong == NOTHING || fault.after-- > 0 || fault.times-- <= 0) return Fault{};
    return fault;
  }
};

int64_t up(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// As pread and pwrite.
int64_t attempt(Pool &pool, int fd, Kind kind, char *memory, int64_t offset, int64_t size) {
  const Fault fault = pool.injected();
  if (fault.wrong == IS_LATE) usleep(fault.value);
  if (fault.wrong == FAILS) return errno = fault.value, -1;
  if (fault.wrong == MOVES_LESS) size = std::min(size, up(fault.value));
  int64_t moved = kind == SYNC    ? fdatasync(fd)
                  : kind == WRITE ? pwrite(fd, memory, size, offset)
                                  : pread(fd, memory, size, offset);
  return fault.wrong == MOVES_LESS ? std::min(moved, fault.value) : moved;
}

// The page cache gives back what was moved through it; what was written is on the drive before.
int32_t forget(int fd, const Piece &piece) {
  constexpr int WHOLE =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (piece.kind == WRITE && sync_file_range(fd, piece.offset, piece.size, WHOLE)) {
    const bool unknown = errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP;
    if (!unknown || fdatasync(fd)) return errno;
  }
  posix_fadvise(fd, piece.offset, piece.size, POSIX_FADV_DONTNEED);
  return 0;
}

// 0, an errno or TRUNCATED. A rest of less than a page is moved again: O_DIRECT takes whole pages.
// A file that was cut must not be written either, which would make it long enough again.
int32_t transfer(Pool &pool, const Drive &drive, const Piece &piece) {
  struct stat status;
  if (fstat(drive.fd, &status)) return errno;
  if (status.st_size < drive.bytes) return TRUNCATED;
  int busy = 0, stuck = 0;
  for (int64_t at = 0; at < piece.size;) {
    const int64_t moved = attempt(pool, drive.fd, piece.kind, piece.memory + at, piece.offset + at,
                                  piece.size - at);
    if (piece.kind == SYNC && moved == 0) return 0;
    if (moved < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN || ++busy > BUSY_TRIES) return errno;
      usleep(1000);
      continue;
    }
    if (moved == 0 && piece.kind == READ) return TRUNCATED;
    if (moved < PAGE && ++stuck == STUCK_TRIES) return piece.kind == READ ? TRUNCATED : EIO;
    if (moved >= PAGE) stuck = 0;
    at += moved / PAGE * PAGE;
  }
  return drive.direct ? 0 : forget(drive.fd, piece);
}

// The part of the share's next stripe that the request covers.
Piece cut(const Pool &pool, Share &share) {
  const Request &request = *share.of;
  const int64_t count = pool.drives.size(), start = share.stripe * pool.stripe;
  const int64_t from = std::max(request.offset, start);
  const int64_t size = std::min(request.end, start + pool.stripe) - from;
  const int64_t offset = share.stripe / count * pool.stripe + from - start;
  share.stripe += count;
  if (request.kind == SYNC) return Piece{SYNC, nullptr, 0, 1};
  return Piece{request.kind, request.memory + (from - request.offset), offset, size};
}

void work(Pool &pool, int32_t index) {
  Drive &drive = *pool.drives[index];
  std::unique_lock<std::mutex> lock(pool.mutex);
  for (;;) {
    drive.wake.wait(lock, [&] { return pool.stopping || !drive.shares.empty(); });
    if (drive.shares.empty()) return;
    Share share = drive.shares.front();
    drive.shares.pop_front();
    const Piece piece = cut(pool, share);
    if (share.stripe < share.end) drive.shares.push_back(share);
    if (!pool.failure.code) {
      lock.unlock();
      const int32_t code = transfer(pool, drive, piece);
      lock.lock();
      if (code && !pool.failure.code)
        pool.failure = {code, index, piece.kind, piece.offset, piece.size};
    }
    if (--share.of->left == 0) share.of->done.notify_one();
  }
}

// Put the request to the drives and wait for it; `first` to before `last` are its stripes.
int32_t run(Pool &pool, Request &request, int64_t first, int64_t last, Failure *failure) {
  std::unique_lock<std::mutex> lock(pool.mutex);
  const int64_t count = pool.drives.size();
  if (!pool.failure.code) {
    request.left = last - first;
    for (int64_t stripe = first; stripe < std::min(last, first + count); ++stripe) {
      Drive &drive = *pool.drives[stripe % count];
      drive.shares.push_back({&request, stripe, last});
      drive.wake.notify_all();
    }
    request.done.wait(lock, [&] { return request.left == 0; });
  }
  *failure = pool.failure;
  return failure->code;
}

void stop(Pool &pool) {
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    pool.stopping = true;
    if (!pool.failure.code) pool.failure.code = CLOSED;
    for (auto &drive : pool.drives) drive->wake.notify_all();
  }
  for (auto &thread : pool.threads) thread.join();
  pool.threads.clear();
}

// Signals are for the threads of who started these.
void start(Pool &pool, int32_t threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::error_code failed;
  try {
    for (size_t drive = 0; drive < pool.drives.size(); ++drive)
      for (int32_t thread = 0; thread < threads; ++thread)
        pool.threads.emplace_back(work, std::ref(pool), static_cast<int32_t>(drive));
  } catch (const std::system_error &error) {
    failed = error.code();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failed) throw std::system_error(failed);
}

}  // namespace

extern "C" {

// Of open files, which stay the caller's; direct: whether O_DIRECT is set. nullptr where threads
// cannot be had.
Pool *disk_open(int32_t count, const int32_t *fds, const int64_t *bytes, const int32_t *direct,
                int64_t stripe, int32_t threads) {
  auto pool = std::make_unique<Pool>();
  pool->stripe = stripe;
  for (int32_t i = 0; i < count; ++i)
    pool->drives.emplace_back(new Drive{fds[i], bytes[i], direct[i] != 0, {}, {}});
  try {
    start(*pool, threads);
  } catch (const std::system_error &) {
    stop(*pool);
    return nullptr;
  }
  return pool.release();
}

// Blocks. 0, or the code of *failure.
int32_t disk_move(Pool *pool, int32_t writing, char *memory, int64_t offset, int64_t bytes,
                  Failure *failure) {
  Request request{writing ? WRITE : READ, memory, offset, offset + bytes, 0, {}};
  const int64_t last = (offset + bytes + pool->stripe - 1) / pool->stripe;
  return run(*pool, request, offset / pool->stripe, last, failure);
}

// Blocks until all that was written before is on the drives. 0, or the code of *failure.
int32_t disk_sync(Pool *pool, Failure *failure) {
  Request request{SYNC, nullptr, 0, 0, 0, {}};
  return run(*pool, request, 0, pool->drives.size(), failure);
}

// Returns when no thread touches a file; requests under way and all later ones fail. The pool's
// few bytes stay, because a caller may be on its way in.
void disk_close(Pool *pool) { stop(*pool); }

// For tests.
void disk_fault(Pool *pool, int32_t wrong, int64_t value, int64_t after, int64_t times) {
  std::lock_guard<std::mutex> lock(pool->mutex);
  pool->fault = {wrong, value, after, times};
}
}
