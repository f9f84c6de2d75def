// The CUDA backend through the public API on a GPU, against float64; skipped where there is none,
// failed with PLAIT_REQUIRE_GPU=1. One binary and no Python: what to run first on a new machine or
// driver.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "cuda/driver.h"
#include "cuda/plain_case.h"
#include "plait/attention.h"
#include "plait/cuda_memory.h"
#include "plait/error.h"
#include "required.h"

namespace plait::test {
namespace {

const Device kGpu{kCuda, 0};

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda::driver_available(&why)) return;
    if (required("PLAIT_REQUIRE_GPU")) FAIL() << why;
    GTEST_SKIP() << why;
  }
};

template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr Dtype dtype = Dtype::kFloat32;
  static constexpr uint8_t code = 2, bits = 32;
};
template <>
struct DtypeOf<Bfloat16> {
  static constexpr Dtype dtype = Dtype::kBfloat16;
  static constexpr uint8_t code = 4, bits = 16;
};
template <>
struct DtypeOf<Float16> {
  static constexpr Dtype dtype = Dtype::kFloat16;
  static constexpr uint8_t code = 2, bits = 16;
};
template <>
struct DtypeOf<int> {
  static constexpr uint8_t code = 0, bits = 32;
};

// A contiguous tensor, on the host or copied to the GPU.
template <class T>
class Tensor {
 public:
  Tensor(const Device& device, const std::vector<T>& values, std::vector<int64_t> shape)
      : device_(device), host_(values), shape_(std::move(shape)) {
    if (device.type == kCpu) return;
    const long long bytes = static_cast<long long>(values.size() * sizeof(T));
    data_ = device_alloc(device, bytes);
    copy_to_device(device, data_, values.data(), bytes);
  }
  ~Tensor() {
    if (data_ != nullptr) device_free(device_, data_);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  operator TensorView() {
    TensorView view;
    view.data = device_.type == kCpu ? host_.data() : data_;
    view.device_type = device_.type;
    view.device_id = device_.id;
    view.ndim = static_cast<int32_t>(shape_.size());
    view.dtype_code = DtypeOf<T>::code;
    view.dtype_bits = DtypeOf<T>::bits;
    view.shape = shape_.data();
    return view;
  }
  std::vector<T> to_host() {
    copy_to_host(device_, host_.data(), data_, static_cast<long long>(host_.size() * sizeof(T)));
    return host_;
  }
  void* data() { return data_; }

 private:
  Device device_;
  std::vector<T> host_;
  std::vector<int64_t> shape_;
  void* data_ = nullptr;
};
Tensor<int> host_ints(const std::vector<int>& values) {
  return Tensor<int>(Device{}, values, {static_cast<int64_t>(values.size())});
}

template <class T>
AttentionConfig config_of(const Case<T>& c, const char* kernel) {
  AttentionConfig config;
  config.num_qo_heads = c.num_qo_heads();
  config.num_kv_heads = c.shape.num_kv_heads;
  config.head_dim_qk = c.shape.head_dim_qk;
  config.head_dim_vo = c.shape.head_dim_vo;
  config.dtype = DtypeOf<T>::dtype;
  config.kv = c.shape.affine ? ragged_kv() : paged_kv(c.shape.page_size);
  if (c.view.num_levels > 1) config.kv = composed_kv(config.kv, c.view.num_levels);
  config.variant = c.visible.causal ? causal() : full();
  if (c.visible.window_left >= 0) {
    config.variant = config.variant | sliding_window(c.visible.window_left, c.visible.sink_tokens);
  }
  config.bounds.requests = 16;
  config.bounds.query_tokens = 512;
  config.bounds.keys = 4096;
  config.device = kGpu;
  config.kernel = kernel;
  return config;
}

// Plans and runs one case after another with one Attention, eagerly or by one captured graph.
template <class T>
class Runner {
 public:
  Runner(const Case<T>& first, const char* kernel, int num_rows)
      : attention_(config_of(first, kernel)), num_rows_(num_rows) {}
  const Attention& attention() const { return attention_; }

  void plan(const Case<T>& c) {
    const int n = c.view.num_requests, shared = c.view.num_levels > 1 ? 1 : 0;
    std::vector<int> qo(1, 0);
    for (int r = 0; r < n; ++r) {
      qo.push_back(qo.back() + static_cast<int>(std::count(c.view.token_request.begin(),
                                                           c.view.token_request.end(), r)));
    }
    Tensor<int> qo_indptr = host_ints(qo);
    std::vector<std::unique_ptr<Tensor<int>>> keep;
    const auto ints = [&](const std::vector<int>& values) -> TensorView {
      keep.push_back(std::make_unique<Tensor<int>>(
          Device{}, values, std::vector<int64_t>{static_cast<int64_t>(values.size())}));
      return *keep.back();
    };
    const auto tables = [&](int first, int last) {
      KvTables t;
      t.kv_len = ints({c.list_len.begin() + first, c.list_len.begin() + last});
      if (c.shape.affine) {
        t.kv_begin = ints({c.first_row.begin() + first, c.first_row.begin() + last});
        return t;
      }
      std::vector<int> indptr;
      for (int i = first; i <= last; ++i) indptr.push_back(c.page_indptr[i] - c.page_indptr[first]);
      t.kv_page_indptr = ints(indptr);
      t.kv_page_indices =
          ints({c.pages.begin() + c.page_indptr[first], c.pages.begin() + c.page_indptr[last]});
      return t;
    };
    Batch batch;
    batch.qo_indptr = qo_indptr;
    if (shared == 0) {
      batch.kv = tables(0, n);
    } else {
      batch.levels.resize(2);
      std::vector<int> all(n);
      std::iota(all.begin(), all.end(), 0);
      batch.levels[0].tables = tables(0, 1);
      batch.levels[0].node_indptr = ints({0, n});
      batch.levels[0].node_requests = ints(all);
      batch.levels[1].tables = tables(1, n + 1);
    }
    attention_.plan(batch);
  }

  // Out and lse of all rows, padding included.
  struct Result {
    std::vector<T> out;
    std::vector<float> lse;
  };
  Result run(const Case<T>& c, CudaGraph* graph = nullptr) {
    if (graph == nullptr) {
      upload(c);
      attention_.run(args(c), nullptr);
    } else {
      upload(c);
      graph->launch();
    }
    synchronize(kGpu);
    return {out_->to_host(), lse_->to_host()};
  }
  std::unique_ptr<CudaGraph> capture(const Case<T>& c) {
    upload(c);
    return std::make_unique<CudaGraph>(kGpu, [&](Stream s) { attention_.run(args(c), s); });
  }

 private:
  // Tensors at addresses that stay: graphs know them.
  void upload(const Case<T>& c) {
    const Shape& s = c.shape;
    const int64_t heads = c.num_qo_heads(), page = s.affine ? 1 : s.page_size;
    const auto rows_of = [&](std::vector<T> values, std::size_t size) {
      values.resize(size, from_float<T>(std::numeric_limits<float>::quiet_NaN()));
      return values;
    };
    const std::size_t out_size = static_cast<std::size_t>(num_rows_) * heads * s.head_dim_vo;
    const auto put = [&](std::unique_ptr<Tensor<T>>& to, const std::vector<T>& values,
                         std::vector<int64_t> shape) {
      if (to == nullptr) {
        to = std::make_unique<Tensor<T>>(kGpu, values, shape);
      } else {
        copy_to_device(kGpu, to->data(), values.data(),
                       static_cast<long long>(values.size() * sizeof(T)));
      }
    };
    const int64_t slots = kSlots * page;
    const auto cache_shape = [&](int64_t dim) {
      return s.affine ? std::vector<int64_t>{slots, s.num_kv_heads, dim}
                      : std::vector<int64_t>{kSlots, page, s.num_kv_heads, dim};
    };
    ASSERT_LE(c.num_slots, slots) << "the test's cache is too small for the case";
    put(q_, rows_of(c.q.data, static_cast<std::size_t>(num_rows_) * heads * s.head_dim_qk),
        {num_rows_, heads, s.head_dim_qk});
    put(k_, rows_of(c.k.data, slots * s.num_kv_heads * s.head_dim_qk), cache_shape(s.head_dim_qk));
    put(v_, rows_of(c.v.data, slots * s.num_kv_heads * s.head_dim_vo), cache_shape(s.head_dim_vo));
    put(out_, std::vector<T>(out_size, from_float<T>(7.0f)), {num_rows_, heads, s.head_dim_vo});
    const std::vector<float> lse(static_cast<std::size_t>(num_rows_) * heads, 7.0f);
    if (lse_ == nullptr) {
      lse_ = std::make_unique<Tensor<float>>(kGpu, lse, std::vector<int64_t>{num_rows_, heads});
    } else {
      copy_to_device(kGpu, lse_->data(), lse.data(), static_cast<long long>(lse.size() * 4));
    }
  }
  RunArgs args(const Case<T>& c) {
    RunArgs args;
    args.q = *q_;
    args.k = *k_;
    args.v = *v_;
    args.out = *out_;
    args.lse = *lse_;
    args.sm_scale = c.sm_scale;
    return args;
  }

  static constexpr int64_t kSlots = 4096;  // pages, or rows where affine
  Attention attention_;
  int num_rows_;
  std::unique_ptr<Tensor<T>> q_, k_, v_, out_;
  std::unique_ptr<Tensor<float>> lse_;
};

template <class T>
void compare(const Case<T>& c, const typename Runner<T>::Result& got, double tolerance) {
  const Expected expected = reference(c, PlainMeaning{});
  const std::size_t rows = got.lse.size(), dim = c.shape.head_dim_vo;
  int wrong = 0;
  const auto check_one = [&](double x, double want, const char* what, std::size_t row,
                             std::size_t i) {
    if (x == want || std::abs(x - want) <= tolerance * (1 + std::abs(want))) return;
    if (++wrong <= 5) {
      ADD_FAILURE() << what << "[row " << row / c.num_qo_heads() << ", head "
                    << row % c.num_qo_heads() << ", " << i << "] is " << x << ", reference "
                    << want;
    }
  };
  for (std::size_t row = 0; row < rows; ++row) {
    const bool padding = row >= expected.lse.size();
    for (std::size_t i = 0; i < dim; ++i) {
      check_one(to_float(got.out[row * dim + i]), padding ? 0 : expected.out[row * dim + i], "out",
                row, i);
    }
    check_one(got.lse[row], padding ? -std::numeric_limits<double>::infinity() : expected.lse[row],
              "lse", row, 0);
  }
  EXPECT_EQ(wrong, 0) << "elements differ from the reference";
}

template <class T>
void run_one(const Case<T>& c, const char* kernel, double tolerance) {
  Runner<T> runner(c, kernel, c.num_tokens() + 3);
  runner.plan(c);
  compare(c, runner.run(c), tolerance);
}

Shape shape_of(int kv_heads, int group, int dim, bool affine, int page_size = 16) {
  return {kv_heads, group, dim, dim, affine, page_size};
}

TEST_F(Gpu, PlainFloatFormats) {
  for (const bool affine : {false, true}) {
    SCOPED_TRACE(affine ? "ragged" : "paged");
    Shape shape;
    shape.affine = affine;
    run_one(make_case<float>(shape, {1, -1, 0}, {1, 7, 0, 33}, {3000, 200, 5, 20}, 0, 1), "plain",
            1e-5);
  }
  run_one(make_case<float>({}, {1, 100, 4}, {1, 40}, {2500, 300}, 0, 2), "plain", 1e-5);
  run_one(make_case<float>({}, {1, -1, 0}, {1, 4, 2}, {70, 4, 2}, 1500, 3), "plain", 1e-5);
}

TEST_F(Gpu, PlainHalves) {
  run_one(make_case<Bfloat16>({}, {1, -1, 0}, {1, 7}, {3000, 200}, 0, 4), "plain", 1.0 / 256);
  run_one(make_case<Float16>({}, {0, -1, 0}, {1, 7}, {3000, 200}, 0, 5), "plain", 1.0 / 2048);
}

// Skips the rest of the test where the kernel does not exist.
#define SKIP_WITHOUT_SM90()                                                      \
  if (cuda::gpu_info(0).arch != "90a") {                                         \
    GTEST_SKIP() << "kernel sm90a needs compute capability 9.0, this GPU is sm_" \
                 << cuda::gpu_info(0).arch;                                      \
  }

// Twice the rounding of P and of the result to bfloat16, as FlashAttention's tests allow.
constexpr double kBfloat16Tolerance = 2.0 / 128;

TEST_F(Gpu, Sm90Formats) {
  SKIP_WITHOUT_SM90();
  for (const bool affine : {true, false}) {
    for (const int page : {1, 3, 16}) {
      if (affine && page > 1) continue;
      SCOPED_TRACE(affine ? "ragged" : "page size " + std::to_string(page));
      const Shape shape = shape_of(2, 4, 128, affine, page);
      run_one(make_case<Bfloat16>(shape, {1, -1, 0}, {1, 7, 0, 133}, {1900, 200, 5, 140}, 0, 6),
              "sm90a", kBfloat16Tolerance);
      run_one(make_case<Bfloat16>(shape, {1, 100, 4}, {1, 70}, {1500, 300}, 0, 7), "sm90a",
              kBfloat16Tolerance);
    }
  }
  run_one(
      make_case<Bfloat16>(shape_of(2, 4, 128, false), {1, -1, 0}, {1, 4, 2}, {70, 4, 2}, 1500, 8),
      "sm90a", kBfloat16Tolerance);
}

TEST_F(Gpu, Sm80Formats) {
  if (std::stoi(cuda::gpu_info(0).arch) < 80) {
    GTEST_SKIP() << "kernel sm80 needs compute capability 8.0, this GPU is sm_"
                 << cuda::gpu_info(0).arch;
  }
  for (const int dim : {40, 128}) {
    for (const int group_size : {1, 4}) {
      for (const int page : {0, 1, 16}) {
        SCOPED_TRACE(concat("head_dim ", dim, ", page size ", page, ", group ", group_size));
        const Shape shape = shape_of(2, group_size, dim, page == 0, std::max(page, 1));
        run_one(make_case<Bfloat16>(shape, {1, -1, 0}, {1, 7, 0, 133}, {1900, 200, 5, 140}, 0, 6),
                "sm80", kBfloat16Tolerance);
        run_one(make_case<Bfloat16>(shape, {1, 100, 4}, {1, 1}, {1500, 300}, 0, 7), "sm80",
                kBfloat16Tolerance);
      }
    }
  }
  run_one(
      make_case<Bfloat16>(shape_of(2, 4, 128, false), {1, -1, 0}, {1, 4, 2}, {70, 4, 2}, 1500, 8),
      "sm80", kBfloat16Tolerance);
}

TEST_F(Gpu, OneGraphServesLaterPlans) {
  for (const char* kernel : {"plain", "sm80", "auto"}) {
    SCOPED_TRACE(kernel);
    if (kernel == std::string("sm80") && std::stoi(cuda::gpu_info(0).arch) < 80) continue;
    const Shape shape = shape_of(2, 4, 128, false);
    const auto a = make_case<Bfloat16>(shape, {1, -1, 0}, {1, 1, 1}, {1000, 20, 1}, 0, 9);
    const auto b = make_case<Bfloat16>(shape, {1, -1, 0}, {1, 9, 0, 30}, {3000, 9, 7, 900}, 0, 10);
    Runner<Bfloat16> runner(a, kernel, 64);
    runner.plan(a);
    const auto eager_a = runner.run(a);
    runner.plan(b);
    const auto eager_b = runner.run(b);
    runner.plan(a);
    const auto graph = runner.capture(a);
    const auto same = [](const auto& x, const auto& y) {
      EXPECT_EQ(std::memcmp(x.out.data(), y.out.data(), x.out.size() * 2), 0) << "out differs";
      EXPECT_EQ(std::memcmp(x.lse.data(), y.lse.data(), x.lse.size() * 4), 0) << "lse differs";
    };
    same(runner.run(a, graph.get()), eager_a);
    runner.plan(b);
    same(runner.run(b, graph.get()), eager_b);
    same(runner.run(b, graph.get()), eager_b);  // counters are zero again
    compare(b, eager_b, kBfloat16Tolerance);
  }
}

TEST_F(Gpu, PlanIsRefusedWhileItsStreamCaptures) {
  const auto c = make_case<float>({}, {1, -1, 0}, {1}, {10}, 0, 11);
  Attention attention(config_of(c, "plain"));
  std::vector<int> qo{0, 1}, len{10}, indptr{0, 4};
  Tensor<int> qo_indptr = host_ints(qo), kv_len = host_ints(len), page_indptr = host_ints(indptr);
  Tensor<int> pages = host_ints(c.pages);
  Batch batch;
  batch.qo_indptr = qo_indptr;
  batch.kv.kv_len = kv_len;
  batch.kv.kv_page_indptr = page_indptr;
  batch.kv.kv_page_indices = pages;
  try {
    CudaGraph graph(kGpu, [&](Stream s) { attention.plan(batch, s); });
    FAIL() << "plan() was captured";
  } catch (const ArgumentError& error) {
    EXPECT_NE(std::string(error.what()).find("captures a CUDA graph"), std::string::npos)
        << error.what();
  }
  attention.plan(batch);  // and works afterwards
}

TEST_F(Gpu, CurrentContextIsUnchanged) {
  cuda::Context before = nullptr, after = nullptr;
  cuda::driver().CtxGetCurrent(&before);
  run_one(make_case<float>({}, {1, -1, 0}, {2}, {10}, 0, 12), "plain", 1e-5);
  cuda::driver().CtxGetCurrent(&after);
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace plait::test
