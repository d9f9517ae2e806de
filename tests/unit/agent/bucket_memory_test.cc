#include "agent/bucket_memory.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <gtest/gtest.h>
#include <mutex>
#include <thread>

#include "tensorbus/kernels/copy.h"
#include "tests/testing/deadline.h"
#include "tests/testing/random_blocks.h"
#include "tests/testing/status_matchers.h"
#include "worker_shim/bucket_service.h"

namespace tensorbus::agent {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::In;
using testing::IsStatus;
using testing::Random;
using transport::ForeignPart;

/// A worker that serves orders one after the other, in a thread of its own, while it is told to.
class ServingWorker {
 public:
  ServingWorker() : thread_([this] { Serve(); }) {}
  ~ServingWorker() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  ServingWorker(const ServingWorker&) = delete;
  ServingWorker& operator=(const ServingWorker&) = delete;

  worker_shim::BucketService& service() { return service_; }
  void SetServing(bool serving) {
    const std::lock_guard lock(mutex_);
    serving_ = serving;
    changed_.notify_all();
  }
  std::size_t orders() const {
    const std::lock_guard lock(mutex_);
    return orders_;
  }
  /// Waits until nothing is queued.
  void Drain() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, seconds(20), [this] { return queue_.empty() && !busy_; }));
  }
  void Connect(std::shared_ptr<BucketChannel> channel) { channel_ = std::move(channel); }
  void Receive(wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
               std::vector<UniqueFd> fds) {
    const std::lock_guard lock(mutex_);
    queue_.push_back({type, request, std::move(body), std::move(fds)});
    changed_.notify_all();
  }

 private:
  struct Order {
    wire::MessageType type;
    std::uint64_t request = 0;
    std::vector<std::byte> body;
    std::vector<UniqueFd> fds;
  };

  void Serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || (serving_ && !queue_.empty()); });
      if (stop_) return;
      Order order = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      Handle(order);
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }
  void Handle(Order& order) {
    if (order.type == wire::MessageType::kAttachBucket) {
      EXPECT_OK(service_.Attach(*wire::Decode<wire::AttachBucket>(order.body),
                                std::move(order.fds.at(0))));
      return;
    }
    const wire::BucketWork work = *wire::Decode<wire::BucketWork>(order.body);
    const Status status =
        order.type == wire::MessageType::kPack ? service_.Pack(work) : service_.Unpack(work);
    {
      const std::lock_guard lock(mutex_);
      ++orders_;
    }
    channel_->OnDone(order.request, status);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Order> queue_;
  std::size_t orders_ = 0;
  bool serving_ = true;
  bool busy_ = false;
  bool stop_ = false;
  worker_shim::BucketService service_;
  std::shared_ptr<BucketChannel> channel_;
  std::thread thread_;
};

/// A rank with two segments: a matrix held transposed, a thousand small tensors, a big one, and one
/// tensor in two places.
class BucketModeMemory : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kBudget = std::uint64_t{4} << 20;

  void SetUp() override {
    Add("transposed", {40, 30}, {Range{8, 40}, Range{0, 30}}, true);
    for (int i = 0; i < 1000; ++i) Add("small" + std::to_string(i), {64}, {Range{0, 64}}, false);
    Add("big", {3000, 1024}, {Range{0, 2000}, Range{0, 1024}}, false);
    Add("twice", {64}, {Range{0, 64}}, false);
    Add("twice", {64}, {Range{0, 64}}, false);
    registration_.segment_bytes = {100000, end_ - 100000 + 1};
    for (Piece& piece : registration_.pieces) {
      if (piece.offset < 100000) continue;
      piece.segment = 1;
      piece.offset -= 100000;
    }
    memory_.resize(end_ + 1);
    Random random(5);
    testing::FillRandom(random, memory_);
    bases_ = {memory_.data(), memory_.data() + 100000};
    worker_.service().SetMemory(registration_, bases_);
    pieces_ = std::make_shared<const PieceIndex>(registration_, "policy");
    channel_ = std::make_shared<BucketChannel>(
        "policy/trainer rank 4", 1,
        [this](wire::MessageType type, std::uint64_t request, std::vector<std::byte> body,
               std::vector<UniqueFd> fds) {
          worker_.Receive(type, request, std::move(body), std::move(fds));
        },
        seconds(20));
    worker_.Connect(channel_);
    ASSERT_OK_AND_ASSIGN(bucket_, BucketMemory::Create(channel_, pieces_, bases_, budget_));
    for (std::uint32_t i = 0; i < registration_.pieces.size(); ++i) {
      blocks_.push_back(pieces_->Place(i).At(bases_));
    }
  }

  void Add(const std::string& name, std::vector<std::uint64_t> shape, std::vector<Range> box,
           bool transposed) {
    std::uint32_t tensor = 0;
    while (tensor < registration_.tensors.size() && registration_.tensors[tensor].name != name) {
      ++tensor;
    }
    if (tensor == registration_.tensors.size()) {
      registration_.tensors.push_back({name, DType::kF32, Shape::Create(shape).value()});
    }
    Piece piece;
    piece.tensor = tensor;
    piece.box = Box(box);
    if (end_ < 100000 && end_ + piece.box.volume() * 4 > 100000) end_ = 100000;
    piece.offset = end_;
    std::uint64_t stride = 4;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const std::size_t d = transposed ? i : shape.size() - 1 - i;
      piece.strides[d] = stride;
      stride *= box[d].size();
    }
    end_ += stride;
    registration_.pieces.push_back(piece);
  }
  std::vector<ForeignPart> Everything() const {
    std::vector<ForeignPart> parts;
    for (const StridedBlock& block : blocks_) {
      parts.push_back({.block = &block, .first = 0, .count = block.bytes()});
    }
    return parts;
  }
  std::vector<std::byte> Packed() const {
    std::vector<std::byte> all;
    for (const StridedBlock& block : blocks_) {
      std::vector<std::byte> bytes(block.bytes());
      kernels::PackRange(block, 0, bytes);
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }

  std::uint64_t end_ = 0;
  Registration registration_;
  std::vector<std::byte> memory_;
  std::vector<std::byte*> bases_;
  std::vector<StridedBlock> blocks_;
  ServingWorker worker_;
  std::shared_ptr<const PieceIndex> pieces_;
  std::shared_ptr<BucketChannel> channel_;
  std::shared_ptr<transport::StagingBudget> budget_ = transport::StagingBudget::Create(kBudget);
  std::shared_ptr<BucketMemory> bucket_;
};

TEST_F(BucketModeMemory, ReadsAllThroughFewOrdersAndABoundedBudget) {
  const std::vector<std::byte> want = Packed();
  std::vector<std::byte> got(want.size());
  ASSERT_GT(got.size(), kBudget) << "more than the budget has at once";
  ASSERT_OK(bucket_->Read(Everything(), got, In(seconds(20))));
  EXPECT_TRUE(got == want);
  EXPECT_LE(worker_.orders(), got.size() / bucket_->stage_bytes() + 1) << "one order a piece?";
  EXPECT_LE(budget_->used_bytes_max(), kBudget / 2);
}

TEST_F(BucketModeMemory, WritesAllPlacesAndNothingElse) {
  const std::vector<std::byte> before = memory_;
  std::vector<std::byte> sent = Packed();
  Random random(6);
  testing::FillRandom(random, sent);
  // The two places of one tensor get what was sent for each.
  ASSERT_OK(bucket_->Write(Everything(), sent, In(seconds(20))));
  EXPECT_TRUE(Packed() == sent);
  std::vector<bool> covered(memory_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Piece& piece = registration_.pieces[i];
    const std::uint64_t begin = piece.offset + (piece.segment == 1 ? 100000 : 0);
    for (std::uint64_t at = 0; at < blocks_[i].bytes(); ++at) covered[begin + at] = true;
  }
  for (std::size_t i = 0; i < memory_.size(); ++i) {
    if (covered[i]) continue;
    ASSERT_EQ(memory_[i], before[i]) << i;
  }
}

TEST_F(BucketModeMemory, ReadsPartsOfBoxesInsidePieces) {
  const Box inner(std::vector<Range>{Range{11, 23}, Range{4, 19}});
  const StridedBlock block = pieces_->Place(0, inner).At(bases_);
  std::vector<std::byte> want(101);
  kernels::PackRange(block, 77, want);
  const ForeignPart part = {.block = &block, .first = 77, .count = want.size()};
  ASSERT_OK_AND_ASSIGN(const transport::ForeignStage stage, bucket_->Borrow(In(seconds(20))));
  const std::span<std::byte> in_bucket = stage.bytes.subspan(500, want.size());
  ASSERT_OK(bucket_->Read({&part, 1}, in_bucket, In(seconds(20))));
  EXPECT_TRUE(std::equal(want.begin(), want.end(), in_bucket.begin()));
}

TEST_F(BucketModeMemory, NamesAWorkerThatDoesNotServeAndSurvivesItsLateWork) {
  const std::vector<std::byte> want = Packed();
  worker_.Drain();
  worker_.SetServing(false);
  const ForeignPart part = {.block = &blocks_[0], .first = 0, .count = blocks_[0].bytes()};
  std::vector<std::byte> got(part.count);
  const Status late = bucket_->Write({&part, 1}, got, In(milliseconds(300)));
  EXPECT_THAT(late, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_NE(late.message().find("policy/trainer rank 4"), std::string::npos) << late;
  EXPECT_NE(late.message().find("service thread"), std::string::npos) << late;
  // Now it wakes up and does what it was told long ago, before what it is told now; and the bucket
  // it does it with is not one that anybody uses any more.
  std::vector<std::byte> sent(part.count, std::byte{7});
  std::thread waker([this] { worker_.SetServing(true); });
  EXPECT_OK(bucket_->Write({&part, 1}, sent, In(seconds(20))));
  waker.join();
  ASSERT_OK(bucket_->Read({&part, 1}, got, In(seconds(20))));
  EXPECT_TRUE(got == sent);
}

TEST_F(BucketModeMemory, FailsWhoWaitsWhenTheConnectionCloses) {
  worker_.Drain();
  worker_.SetServing(false);
  std::thread closer(
      [this] { channel_->Close(Status(Code::kUnavailable, "rank 4 left", Reason::kPeerLost)); });
  const ForeignPart part = {.block = &blocks_[0], .first = 0, .count = blocks_[0].bytes()};
  std::vector<std::byte> got(part.count);
  EXPECT_THAT(bucket_->Read({&part, 1}, got, In(seconds(20))),
              IsStatus(Code::kUnavailable, Reason::kPeerLost));
  closer.join();
}

TEST_F(BucketModeMemory, PassesOnWhatTheWorkerRefuses) {
  worker_.Drain();
  worker_.service().DropBuckets();
  const ForeignPart part = {.block = &blocks_[0], .first = 0, .count = 8};
  std::vector<std::byte> got(8);
  const Status refused = bucket_->Read({&part, 1}, got, In(seconds(20)));
  EXPECT_THAT(refused, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_OK(bucket_->Read({&part, 1}, got, In(seconds(20)))) << "the other bucket, or a fresh one";
}

TEST_F(BucketModeMemory, RefusesToStartWithoutABudget) {
  ASSERT_OK_AND_ASSIGN(const auto taken, budget_->TryAcquire(kBudget - budget_->used_bytes()));
  EXPECT_THAT(BucketMemory::Create(channel_, pieces_, bases_, budget_),
              IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
}

TEST_F(BucketModeMemory, MeasuresASpeed) {
  ASSERT_OK_AND_ASSIGN(const double speed, bucket_->MeasureSpeed(In(seconds(20))));
  EXPECT_GT(speed, 0.0);
}

}  // namespace
}  // namespace tensorbus::agent
