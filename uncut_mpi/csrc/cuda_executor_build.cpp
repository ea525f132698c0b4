// Makes an executor's steps of an operation list and the addresses of its buffers, once for all runs.
#include <algorithm>
#include <bit>
#include <map>

#include "cuda_executor_build.hpp"

namespace uncut::cuda {
namespace {

// A lane without waits writes its progress word after so many steps, and after each product that counts as many. On a
// slow device one alone may take as long as a call is allowed to be without progress.
constexpr std::int64_t checkpoint_interval = 64, long_product = 16;
// What takes long counts as several steps. So after an error, which skips what is not yet issued, nobody waits for more
// than a second or two. 768 of these are 1.3 s of products in f64 and 1 s of copies to the host (H100).
constexpr double operations_per_step = 1e11, bytes_per_step = 64 << 20;
constexpr double most_weight = 64;
constexpr std::uint32_t max_batch_ops = 96;

constexpr unsigned rows_per_thread = 4;
constexpr unsigned blocks_per_multiprocessor = 16;
constexpr unsigned transposed_tile = 32;  // TILE of device/cuda/kernels.py

// Rows of padding that a product computes too, so that it has whole multiples of 16 bytes of them. Without, tensor
// cores are fed by slow kernels, half types' 5 times as slow (docs/performance.md, 2026-11-22). What A's padding holds
// reaches C's padding alone, which nobody reads.
std::int64_t rows_to_add(const Operand &a, const Operand &c) {
    if (a.op != 0 || a.dtype == dtype_f32) return 0;
    const std::int64_t step = alignment_bytes / bytes_of(a.dtype), more = (step - c.rows % step) % step;
    return more <= a.spare_rows && more <= c.spare_rows ? more : 0;
}

MemOp write_word(std::uint32_t value, Address address = 0) {
    MemOp op{};
    op.value.operation = mem_op_write_value_32;
    op.value.address = address;
    op.value.value = value;
    return op;
}

}  // namespace

Executor::Executor(std::shared_ptr<DeviceState> device, const Program &program)
    : device_(std::move(device)),
      board_(program.board),
      board_words_(program.peer_flags.size() * max_lanes),
      rank_(program.rank) {
    files_ = program.files;
    bind_lanes(program);
    // What a call of many products loads at its first use is not known for sure, and where flags are awaited nothing
    // may be loaded.
    const bool awaits_peers = std::ranges::any_of(
        program.operations, [](const Operation &operation) { return operation.code == code_wait_flag; });
    for (std::size_t i = 0; i < program.operations.size(); ++i) {
        const Operation &operation = program.operations[i];
        const auto index = static_cast<std::uint32_t>(i);
        if (program.lanes[operation.lane].kind == host_lane) {
            add_host_step(program, operation, index);
            continue;
        }
        if (program.lanes[operation.lane].kind == net_lane) continue;  // whoever runs the list moves those
        Operation issued = operation;
        if (operation.code == code_copy && transposes(program, operation)) issued.code = code_combine;  // by a kernel
        if (issued.code != code_copy) end_series(lanes_[operation.lane]);
        if (issued.code != code_gemm) end_bundle(lanes_[operation.lane]);
        if (issued.code != code_copy && issued.code != code_record && issued.code != code_signal)
            end_pack(program, lanes_[operation.lane]);
        switch (issued.code) {
            case code_copy:
                add_copy(program, operation);
                pack(program, operation);
                break;
            case code_gemm:
                add_gemm(program, operation);
                if (!awaits_peers && !program.same_sums) add_to_bundle(lanes_[operation.lane]);
                break;
            case code_combine:
                operation.code == code_copy ? add_transposition(program, operation) : add_combine(program, operation);
                break;
            case code_wait_flag: add_wait(program, operation, index); continue;
            case code_wait_event:
            case code_record: add_step(operation, index, static_cast<std::uint32_t>(operation.slot)); continue;
            case code_signal:
                signals_.push_back({flag_of(program, operation), operation.value});
                add_step(operation, index, static_cast<std::uint32_t>(signals_.size() - 1));
                continue;
            default: refuse(operation, "operation code " + std::to_string(operation.code) + " is unknown");
        }
        const std::size_t payload = issued.code == code_copy   ? copies_.size()
                                    : issued.code == code_gemm ? gemms_.size()
                                                               : combines_.size();
        add_step(issued, index, static_cast<std::uint32_t>(payload - 1));
        add_checkpoint_if_due(operation, index);
    }
    for (Lane &lane : lanes_) {
        end_pack(program, lane);
        end_series(lane);
        end_bundle(lane);
    }
    bind_ends(program);
    if (!host_lanes_.empty()) device_->host_worker().reserve(host_lanes_);
    upload_packs();
    upload_bundles();
    tune_products();
}

// A rank's word at a peer is as far before the peer's flags as it has ranks behind it.
void Executor::bind_ends(const Program &program) {
    span_ = program.span;
    const std::size_t size = program.peer_flags.size();
    for (std::size_t peer = 0; peer < size; ++peer) {
        if (peer == rank_) continue;
        told_.push_back(write_word(0, static_cast<Address>(program.peer_flags[peer]) - 4 * (size - rank_)));
        MemOp end{};
        end.value.operation = mem_op_wait_value_32;
        end.value.address = program.own_flags - 4 * (size - peer);
        end.value.flags = device_->wait_flags();
        awaited_ends_.push_back(end);
    }
    // The last one is read by the host: then all others are written.
    told_.push_back(write_word(0));
}

void Executor::tune_products() {
    std::map<ProductShape, DeviceState::Wanted> wanted;
    for (const Gemm &gemm : gemms_)
        if (gemm.tunable) ++wanted.try_emplace(gemm.shape, gemm.shape, gemm.a, gemm.b, 0).first->second.count;
    device_->tune(wanted);
    for (Gemm &gemm : gemms_)
        if (const auto tuned = gemm.tunable ? device_->tuned_product(gemm.shape) : nullptr) gemm.tuned = tuned;
}

void Executor::bind_lanes(const Program &program) {
    lanes_.resize(program.lanes.size());
    std::vector<std::uint8_t> multiplies(program.lanes.size(), 0);
    for (std::size_t l = 0; l < program.lanes.size(); ++l)
        if (program.lanes[l].kind == host_lane) host_lanes_.push_back({static_cast<std::int32_t>(l), {}});
    for (const Operation &operation : program.operations)
        if (operation.code == code_gemm) multiplies[operation.lane] = 1;
    const auto computing = static_cast<std::size_t>(std::count(multiplies.begin(), multiplies.end(), 1));
    const auto of_host = std::ranges::count_if(program.lanes, is_of_host, &LaneRecord::kind);
    device_->reserve(computing, program.lanes.size() - computing - static_cast<std::size_t>(of_host),
                     program.num_events);
    std::size_t next_compute = 0, next_copy = 0;
    for (std::size_t l = 0; l < program.lanes.size(); ++l) {
        if (is_of_host(program.lanes[l].kind)) continue;
        if (multiplies[l] != 0) {
            static_cast<DeviceState::ComputeLane &>(lanes_[l]) = device_->compute_lane(next_compute++);
        } else {
            lanes_[l].stream = device_->copy_stream(next_copy++);
        }
    }
}

std::uint32_t *Executor::host_flag(const Program &program, const Operation &operation) {
    const std::size_t rank = operation.code == code_signal ? program.rank : static_cast<std::size_t>(operation.peer);
    return program.host_flags + rank * max_lanes + static_cast<std::size_t>(operation.slot);
}

// Where a stream writes or awaits the flag of a signal or wait.
Address Executor::flag_of(const Program &program, const Operation &operation) const {
    if (operation.in_host != 0) {
        Address flag = 0;
        device_->driver().check("cuMemHostGetDevicePointer",
                                device_->driver().cuMemHostGetDevicePointer(&flag, host_flag(program, operation), 0));
        return flag;
    }
    const auto peer = static_cast<std::size_t>(operation.peer);
    const Address flags =
        operation.code == code_signal ? static_cast<Address>(program.peer_flags[peer]) : program.own_flags;
    return flags + 4 * static_cast<Address>(operation.slot);
}

void Executor::add_host_step(const Program &program, const Operation &operation, std::uint32_t index) {
    HostStep step{};
    step.code = operation.code;
    step.operation = index;
    step.value = operation.value;
    if (operation.code == code_copy) {
        const Copy copy = copy_of(program, operation);
        if (copy.shape.src_memory_type != memory_type_host || copy.shape.dst_memory_type != memory_type_host)
            refuse(operation, "a lane of the host copies within host memory alone");
        step.to = {file_at(files_, copy.shape.dst_device), copy.shape.dst_device, copy.shape.dst_pitch};
        step.from = {file_at(files_, copy.shape.src_device), copy.shape.src_device, copy.shape.src_pitch};
        step.width = copy.contiguous ? copy.bytes : copy.shape.width_bytes;
        step.columns = copy.bytes == 0 ? 0 : copy.contiguous ? 1 : copy.shape.height;
        if (transposes(program, operation))
            step.transposed_bytes = static_cast<std::size_t>(bytes_of(program.operands[operation.first_operand].dtype));
    } else if (operation.in_host != 0 && (operation.code == code_wait_flag || operation.code == code_signal)) {
        step.flag = host_flag(program, operation);
    } else {
        refuse(operation, "a lane of the host only copies, and waits and tells by flags in host memory");
    }
    const auto is_its = [&](const HostLane &lane) { return lane.number == operation.lane; };
    std::find_if(host_lanes_.begin(), host_lanes_.end(), is_its)->steps.push_back(step);
}

void Executor::add_step(const Operation &operation, std::uint32_t index, std::uint32_t payload) {
    steps_.push_back({operation.code, weight_of(operation, payload), operation.lane, index, payload});
    lanes_[operation.lane].weight += steps_.back().weight;
    if (operation.code <= code_combine) ++num_bodies_;
}

std::uint8_t Executor::weight_of(const Operation &operation, std::uint32_t payload) const {
    double more = 0.0;
    if (operation.code == code_copy) more = static_cast<double>(copies_[payload].bytes) / bytes_per_step;
    if (operation.code == code_gemm && gemms_[payload].bundled) return 0;
    if (operation.code == code_gemm)  // with two copies a part
        more = gemms_[payload].shape.operations() / operations_per_step + 2.0 * gemms_[payload].num_parts;
    return static_cast<std::uint8_t>(std::min(1.0 + more, most_weight));
}

void Executor::add_checkpoint_if_due(const Operation &operation, std::uint32_t index) {
    Lane &lane = lanes_[operation.lane];
    const std::int64_t last = lane.checkpoints.empty() ? 0 : lane.checkpoints.back().issued;
    const bool is_long = operation.code == code_gemm && steps_.back().weight >= long_product;
    if (lane.weight - last < checkpoint_interval && !is_long) return;
    const auto first = static_cast<std::uint32_t>(mem_ops_.size());
    mem_ops_.push_back(write_word(2 * index + 2));
    batches_.push_back({first, 1});
    lane.checkpoints.push_back({index, lane.weight});
    steps_.push_back({code_wait_flag, 1, operation.lane, index, static_cast<std::uint32_t>(batches_.size() - 1)});
    ++lane.weight;
}

void Executor::add_wait(const Program &program, const Operation &operation, std::uint32_t index) {
    Lane &lane = lanes_[operation.lane];
    // Waits that follow one another on a lane share a batch: nothing stands between them.
    const bool extends = !steps_.empty() && steps_.back().code == code_wait_flag &&
                         steps_.back().lane == operation.lane && !lane.checkpoints.empty() &&
                         lane.checkpoints.back().operation + 1 == index &&
                         mem_ops_.size() - batches_.back().first < max_batch_ops;
    if (!extends) {
        batches_.push_back({static_cast<std::uint32_t>(mem_ops_.size()), 0});
        lane.checkpoints.push_back({index, lane.weight});
        add_step(operation, index, static_cast<std::uint32_t>(batches_.size() - 1));
    }
    lane.checkpoints.back().operation = index;
    MemOp wait{};
    wait.value.operation = mem_op_wait_value_32;
    wait.value.address = flag_of(program, operation);
    wait.value.flags = device_->wait_flags();
    // A write takes the lane 1.5 us: before a wait mostly while it would wait anyway, after it never.
    mem_ops_.push_back(write_word(2 * index + 1));  // where, its run knows
    mem_ops_.push_back(wait);
    awaited_.resize(mem_ops_.size());
    awaited_.back() = operation.value;
    batches_.back().count = static_cast<std::uint32_t>(mem_ops_.size()) - batches_.back().first;
}

void Executor::add_transposition(const Program &program, const Operation &operation) {
    const Copy copy = copy_of(program, operation);
    if (copy.shape.src_memory_type != memory_type_device || copy.shape.dst_memory_type != memory_type_device)
        refuse(operation, "a copy that transposes is one within a device, or of a lane of the host");
    const Operand &to = program.operands[operation.first_operand];
    const Operand &from = program.operands[operation.first_operand + 1];
    combines_.push_back(make_transposition(program, from, copy.shape.src_device, copy.shape.dst_device, to.ld));
    combines_.back().copy_bytes = copy.bytes;
}

// A kernel that writes a region transposed, whatever its type.
Executor::Combine Executor::make_transposition(const Program &program, const Operand &from, Address source, Address to,
                                               std::int64_t ld) {
    Combine made{};
    made.function = kernel_of(program, transposing | static_cast<std::uint64_t>(bytes_of(from.dtype)));
    made.arguments.destination = to;
    made.arguments.ld = ld;
    made.arguments.rows = from.cols;
    made.arguments.cols = from.rows;
    made.arguments.source[0] = source;
    made.arguments.source_ld[0] = from.ld;
    made.block_x = transposed_tile;
    made.block_y = threads_per_block / transposed_tile;
    set_grid(made, transposed_tile, transposed_tile);
    return made;
}

void Executor::add_gemm(const Program &program, const Operation &operation) {
    const Operand *operands = &program.operands[operation.first_operand];
    const Operand &c = operands[0];
    Operand a = operands[1], b = operands[2];
    Gemm gemm{};
    gemm.right = b.op > op_bits;
    gemm.form = (gemm.right ? b : a).op & ~op_bits;
    a.op &= op_bits;
    b.op &= op_bits;
    const bool float8 = is_narrow(a.dtype) && a.dtype != dtype_i8;
    const bool float8_b = is_narrow(b.dtype) && b.dtype != dtype_i8;
    const bool half_c = float8 && (c.dtype == dtype_f16 || c.dtype == dtype_bf16);
    const bool own_c = c.dtype == a.dtype && !is_narrow(a.dtype) && a.dtype != dtype_i32;
    if ((a.dtype != b.dtype && !(float8 && float8_b)) || !(own_c || half_c || c.dtype == accumulator_of(a.dtype)))
        refuse(operation, "cuBLAS has no product for its types");
    const std::int64_t m = a.op != 0 ? a.cols : a.rows;
    const std::int64_t k = b.op != 0 ? b.cols : b.rows;
    const std::int64_t n = b.op != 0 ? b.rows : b.cols;
    gemm.a = address_of(program, a);
    gemm.b = address_of(program, b);
    gemm.c = address_of(program, c);
    gemm.shape = {.dtype = a.dtype,
                  .dtype_b = b.dtype,
                  .dtype_c = c.dtype,
                  .op_a = a.op,
                  .op_b = b.op,
                  .m = m + (gemm.form == no_form && c.op == op_n ? rows_to_add(a, c) : 0),
                  .n = n,
                  .k = k,
                  .lda = a.ld,
                  .ldb = b.ld,
                  .ldc = c.ld,
                  .alignment_a = alignment_of(gemm.a),
                  .alignment_b = alignment_of(gemm.b),
                  .alignment_c = alignment_of(gemm.c)};
    gemm.tunable =
        !program.same_sums && gemm.form == no_form && is_tunable(a.dtype) && gemm.shape.m > 0 && n > 0 && k > 0;
    gemm.factor_product = a.factor;
    gemm.factor_c = zero;
    Operand scaling[2] = {c, c};
    std::size_t num_scaling = 1;
    if (operation.num_operands == 4) {
        gemm.factor_c = scaling[1].factor = operands[3].factor;
        num_scaling = 2;
    }
    combines_.push_back(make_combine(program, scaling, num_scaling));
    gemm.scale = static_cast<std::uint32_t>(combines_.size() - 1);
    const Operand &other = gemm.right ? a : b;
    const bool in_place = (gemm.right ? gemm.a : gemm.b) == gemm.c && other.ld == c.ld;
    if (kind_of_form(gemm.form) == triangular && in_place && c.ld * bytes_of(c.dtype) <= device_->max_pitch_bytes())
        gemm.memory = device_->copies_of(lanes_[operation.lane].stream, true);
    if (kind_of_form(gemm.form) == inverse) gemm.solver = kernel_of(program, solving | c.dtype);
    if (kind_of_form(gemm.form) == inverse && !in_place)
        gemm.copy = add_copy_of(program, other, gemm.right ? gemm.a : gemm.b, gemm.c, c.dtype, c.ld, false);
    if (is_epilogue(c.op)) add_epilogue(program, operation, gemm);
    gemm.tunable = gemm.tunable && gemm.num_parts == 0;
    if (is_narrow(a.dtype)) add_narrow_gemm(program, operation, gemm);
    gemms_.push_back(gemm);
}

// One that the library has is called as it is, of float8 as it proposes first. Else A and B are copied.
void Executor::add_narrow_gemm(const Program &program, const Operation &operation, Gemm &gemm) {
    const ProductShape &whole = gemm.shape;
    if (whole.m <= 0 || whole.n <= 0 || whole.k <= 0) return;
    if (takes(whole)) {
        gemm.tuned = proposal(whole, lanes_[operation.lane]);
        if (gemm.tuned != nullptr || whole.dtype == dtype_i8) return;
    }
    if (!add_parts(program, operation, gemm, true)) add_parts(program, operation, gemm, false);
}

// Have the library write C with its epilogue, as it proposes first.
void Executor::add_epilogue(const Program &program, const Operation &operation, Gemm &gemm) {
    const Operand &c = program.operands[operation.first_operand];
    if (program.vectors[0] != 0 || (program.vectors[1] != 0 && c.op != op_epilogue_rows))
        refuse(operation, "the library has no such epilogue");
    ProductShape &shape = gemm.shape;
    if (program.activation == relu) shape.epilogue |= lt_epilogue_relu;
    if (program.activation == gelu) shape.epilogue |= lt_epilogue_gelu;
    if (program.vectors[1] != 0) {
        shape.epilogue |= lt_epilogue_bias;
        gemm.bias = program.vectors[1] + static_cast<Address>(c.diagonal * bytes_of(c.dtype));
        shape.alignment_c = std::min(shape.alignment_c, alignment_of(gemm.bias));
    }
    if (shape.epilogue == 0 || shape.m <= 0 || shape.n <= 0 || shape.k <= 0) return;
    // Else many of its kernels round the sum to the type of C before (docs/performance.md, 2026-11-30).
    const auto is_aligned = [&](std::int64_t extent) { return extent * bytes_of(c.dtype) % alignment_bytes == 0; };
    const bool all = is_aligned(shape.m) && is_aligned(shape.n) && is_aligned(shape.k) && is_aligned(shape.lda) &&
                     is_aligned(shape.ldb) && is_aligned(shape.ldc);
    if (all && std::min({shape.alignment_a, shape.alignment_b, shape.alignment_c}) >= alignment_bytes)
        gemm.tuned = proposal(shape, lanes_[operation.lane]);
    if (gemm.tuned == nullptr) add_sums(program, operation, gemm);
}

// Have a kernel of ours write C of sums beside it, of as many columns at once as there is memory for.
void Executor::add_sums(const Program &program, const Operation &operation, Gemm &gemm) {
    const Operand *operands = &program.operands[operation.first_operand];
    const ProductShape &whole = gemm.shape;
    const std::int64_t column = whole.m * bytes_of(accumulator_of(whole.dtype));
    const std::int64_t cols = static_cast<std::int64_t>(device_->copies_bytes) / column;
    if (cols == 0) refuse(operation, "a column of C is too long for its sums");
    gemm.first_part = static_cast<std::uint32_t>(parts_.size());
    for (std::int64_t j = 0; j < whole.n; j += cols) {
        Part part{whole, gemm.a, gemm.b, device_->copies_of(lanes_[operation.lane].stream), nullptr, -1, -1, 0};
        ProductShape &its = part.shape;
        its.dtype_c = accumulator_of(whole.dtype);
        its.n = std::min(cols, whole.n - j);
        its.ldc = its.m;
        part.b += static_cast<Address>(j * bytes_of(its.dtype_b) * (its.op_b == blas_op_n ? its.ldb : 1));
        Operand ends[3] = {operands[0], operands[0], operands[0]};  // C, the sums, and C as it was
        for (Operand &end : ends) {
            end.cols = its.n;
            end.offset += j * whole.ldc * bytes_of(whole.dtype_c);
        }
        ends[1].dtype = static_cast<std::uint8_t>(its.dtype_c);
        ends[1].factor = one;
        ends[2].factor = gemm.factor_c;
        Combine combine = make_combine(program, ends, gemm.factor_c == zero ? 2 : 3);
        combine.arguments.source[0] = part.c;
        combine.arguments.source_ld[0] = its.ldc;
        part.combine = static_cast<std::int32_t>(combines_.size());
        combines_.push_back(combine);
        parts_.push_back(part);
    }
    gemm.num_parts = static_cast<std::uint32_t>(parts_.size()) - gemm.first_part;
}

// What the library proposes first of float8, or with an epilogue; null where it has nothing, and of others.
std::shared_ptr<const TunedProduct> Executor::proposal(const ProductShape &shape, const Lane &lane) {
    if (shape.epilogue == 0 && (shape.dtype == dtype_i8 || !is_narrow(shape.dtype))) return nullptr;
    const auto [known, is_new] = proposed_.try_emplace(shape);
    if (is_new) {
        const auto made =
            std::make_shared<TunedProduct>(device_->blas(), lane.handle, shape, DeviceState::workspace_bytes);
        if (made->num_proposals() > 0) {
            made->take(0);
            known->second = made;
        }
    }
    return known->second;
}

// Have the library multiply copies: rows of A and columns of B with all of their k, as many at once as there is memory
// for. `turned`: k is contiguous in both, and padded with zeros, as the library takes it. Else float8 is copied as it
// is stored, as a type that holds the same numbers. Returns false, and adds nothing, where the library has no such
// product.
bool Executor::add_parts(const Program &program, const Operation &operation, Gemm &gemm, bool turned) {
    const ProductShape &whole = gemm.shape;
    const Lane &lane = lanes_[operation.lane];
    const std::int64_t item = turned ? 1 : bytes_of(widened(whole)), step = alignment_bytes / item;
    const auto padded = [step](std::int64_t extent) { return (extent + step - 1) / step * step; };
    ProductShape usual = whole;
    usual.alignment_a = usual.alignment_b = 256;
    if (turned) {
        usual.op_a = blas_op_t;
        usual.op_b = blas_op_n;
        usual.k = usual.lda = usual.ldb = padded(whole.k);
        if (!takes(usual)) return false;
    } else {
        usual.dtype = usual.dtype_b = widened(whole);
    }
    const bool k_first_a = usual.op_a != blas_op_n, k_first_b = usual.op_b == blas_op_n;
    // Bytes of so many rows of op(A), or columns of op(B), whose copies begin at multiples of `buffer_alignment`.
    const auto bytes = [&](std::int64_t lines, bool k_is_contiguous) {
        const std::int64_t its = item * padded(whole.k) * (k_is_contiguous ? lines : padded(lines));
        return (its + buffer_alignment - 1) / buffer_alignment * buffer_alignment;
    };
    std::int64_t rows = whole.m, cols = whole.n;
    const auto needed = [&] { return bytes(rows, k_first_a) + bytes(cols, k_first_b); };
    const auto memory = static_cast<std::int64_t>(device_->copies_bytes);
    while (needed() > memory && std::max(rows, cols) > step) {
        std::int64_t &longer = rows > cols ? rows : cols;
        longer = padded((longer + 1) / 2);
    }
    if (needed() > memory) refuse(operation, "k is too long for copies of A and B, which cuBLAS needs here");
    const Operand &a = program.operands[operation.first_operand + 1];
    const Operand &b = program.operands[operation.first_operand + 2];
    const bool stored_k_first_a = whole.op_a != blas_op_n, stored_k_first_b = whole.op_b == blas_op_n;
    const Address to_a = device_->copies_of(lane.stream), to_b = to_a + static_cast<Address>(bytes(rows, k_first_a));
    const auto first_part = parts_.size(), first_combine = combines_.size();
    for (std::int64_t i = 0; i < whole.m; i += rows)
        for (std::int64_t j = 0; j < whole.n; j += cols) {
            Part part{usual, to_a, to_b, 0, nullptr, -1, -1, 0};
            ProductShape &its = part.shape;
            its.m = std::min(rows, whole.m - i);
            its.n = std::min(cols, whole.n - j);
            if (!turned) {
                its.lda = padded(k_first_a ? whole.k : its.m);
                its.ldb = padded(k_first_b ? whole.k : its.n);
            }
            part.c = gemm.c + static_cast<Address>((j * whole.ldc + i) * bytes_of(whole.dtype_c));
            its.alignment_c = alignment_of(part.c);
            part.tuned = proposal(its, lane);
            if (turned && whole.dtype != dtype_i8 && part.tuned == nullptr) {
                parts_.resize(first_part);
                combines_.resize(first_combine);
                return false;
            }
            if (j == 0) {
                Operand from = a;
                from.rows = stored_k_first_a ? whole.k : its.m;
                from.cols = stored_k_first_a ? its.m : whole.k;
                const std::int64_t start = stored_k_first_a ? i * whole.lda : i;
                part.copy_a = add_copy_of(program, from, gemm.a + static_cast<Address>(start), to_a, its.dtype, its.lda,
                                          k_first_a != stored_k_first_a);
            }
            if (i == 0 || cols < whole.n) {
                Operand from = b;
                from.rows = stored_k_first_b ? whole.k : its.n;
                from.cols = stored_k_first_b ? its.n : whole.k;
                const std::int64_t start = stored_k_first_b ? j * whole.ldb : j;
                part.copy_b = add_copy_of(program, from, gemm.b + static_cast<Address>(start), to_b, its.dtype_b,
                                          its.ldb, k_first_b != stored_k_first_b);
            }
            parts_.push_back(part);
        }
    // Copies leave what is behind the k of each line as it is.
    if (usual.k != whole.k) parts_[first_part].cleared_words = static_cast<std::size_t>(needed()) / 4;
    gemm.first_part = static_cast<std::uint32_t>(first_part);
    gemm.num_parts = static_cast<std::uint32_t>(parts_.size() - first_part);
    return true;
}

// What copies a region to a place that is no buffer's: as another type, or bytes as they are, which may be turned.
std::int32_t Executor::add_copy_of(const Program &program, Operand from, Address source, Address to, int dtype,
                                   std::int64_t ld, bool turns) {
    if (turns) {
        combines_.push_back(make_transposition(program, from, source, to, ld));
    } else {
        from.factor = one;
        if (is_narrow(dtype)) from.dtype = dtype_i8, dtype = dtype_i8;  // which has a copy of bytes
        Operand ends[2] = {from, from};
        ends[0].dtype = static_cast<std::uint8_t>(dtype);
        ends[0].ld = ld;
        Combine copy = make_combine(program, ends, 2);
        copy.arguments.destination = to;
        copy.arguments.source[0] = source;
        combines_.push_back(copy);
    }
    return static_cast<std::int32_t>(combines_.size() - 1);
}

void Executor::add_combine(const Program &program, const Operation &operation) {
    const Operand *operands = &program.operands[operation.first_operand];
    const std::span reads(operands + 1, operation.num_operands - std::size_t{1});
    if (operands->op == op_t || operands->op == op_c ||
        std::ranges::any_of(reads, [](const Operand &one) { return one.op != op_n; }))
        refuse(operation, "a COMBINE does not transpose");
    combines_.push_back(make_combine(program, operands, operation.num_operands));
}

Function Executor::kernel_of(const Program &program, std::uint64_t signature) {
    const auto [known, is_new] = kernels_.try_emplace(signature);
    if (is_new) known->second = reinterpret_cast<Function>(program.kernel(signature));
    return known->second;
}

Executor::Combine Executor::make_combine(const Program &program, const Operand *operands, std::size_t count) {
    Combine combine{};
    std::uint64_t signature = operands[0].dtype;
    combine.num_sources = count - 1;
    CombineArguments &arguments = combine.arguments;
    arguments.destination = address_of(program, operands[0]);
    arguments.ld = operands[0].ld;
    arguments.rows = operands[0].rows;
    arguments.cols = operands[0].cols;
    const std::int64_t highest = operands[0].diagonal - (operands[0].cols - 1),
                       lowest = operands[0].diagonal + operands[0].rows - 1;
    const bool is_real = has_real_diagonal(operands[0].op) && highest <= 0 && lowest >= 0;  // somewhere
    // What else lies in the triangle with both of its corners is written as any other region.
    if (is_triangle(operands[0].op) &&
        (is_real || !(is_in_triangle(operands[0].op, highest) && is_in_triangle(operands[0].op, lowest))))
        arguments.ending = operands[0].op, arguments.diagonal = operands[0].diagonal;
    if (is_epilogue(operands[0].op)) {
        const auto from = [&](Address vector) {
            const std::int64_t before = operands[0].diagonal * bytes_of(operands[0].dtype);
            return vector == 0 ? vector : vector + static_cast<Address>(before);
        };
        signature |= with_epilogue;
        arguments.ending = operands[0].op;
        arguments.scale = from(program.vectors[0]), arguments.bias = from(program.vectors[1]);
        arguments.activation = program.activation;
        const auto kept =
            std::find_if(operands + 1, operands + count, [](const Operand &of) { return of.factor == beta; });
        arguments.kept = kept - (operands + 1);
    }
    for (std::size_t i = 1; i < count; ++i) {
        signature |= static_cast<std::uint64_t>(operands[i].dtype + 1) << (4 * i);
        arguments.source[i - 1] = address_of(program, operands[i]);
        arguments.source_ld[i - 1] = operands[i].ld;
        combine.factors[i - 1] = operands[i].factor;
    }
    combine.function = kernel_of(program, signature);
    // Threads run along a column, where memory is contiguous; short columns share a block.
    const std::int64_t threads = (arguments.rows + rows_per_thread - 1) / rows_per_thread;
    combine.block_x = std::bit_ceil(static_cast<unsigned>(std::clamp<std::int64_t>(threads, 1, threads_per_block)));
    combine.block_y = threads_per_block / combine.block_x;
    set_grid(combine, std::int64_t{combine.block_x} * rows_per_thread, combine.block_y);
    return combine;
}

// As many blocks as there is work for, each of so many rows and columns at a time, if the device can hold them.
void Executor::set_grid(Combine &combine, std::int64_t rows, std::int64_t columns) const {
    const auto blocks = static_cast<std::int64_t>(blocks_per_multiprocessor) * device_->multiprocessors();
    const std::int64_t down = (combine.arguments.rows + rows - 1) / rows,
                       along = (combine.arguments.cols + columns - 1) / columns;
    combine.grid_x = static_cast<unsigned>(std::clamp<std::int64_t>(down, 1, blocks));
    combine.grid_y = static_cast<unsigned>(
        std::clamp<std::int64_t>(along, 1, std::clamp<std::int64_t>(blocks / combine.grid_x, 1, 65535)));
}

}  // namespace uncut::cuda
