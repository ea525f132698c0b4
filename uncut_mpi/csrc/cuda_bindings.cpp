// The CUDA classes as Python sees them: plain integers, buffers and values; policy stays in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/complex.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <tuple>

#include "cuda_executor.hpp"
#include "for_each.hpp"
#include "table_bytes.hpp"

namespace nb = nanobind;

namespace uncut {
namespace {

using namespace cuda;

using Integers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Board = nb::ndarray<std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Of an OperationList, a FlagTable and a ProgressBoard.
std::shared_ptr<Executor> make_executor(std::shared_ptr<DeviceState> device, nb::handle list, const Integers &addresses,
                                        nb::handle flags, nb::handle board,
                                        std::function<Address(std::uint64_t)> kernel, std::vector<HostFile> files) {
    const ArrayBytes operations(list.attr("operations")), operands(list.attr("operands")), lanes(list.attr("lanes"));
    const ArrayBytes in_host(list.attr("in_host")());
    const auto peer_flags = nb::cast<Integers>(flags.attr("peers"));
    const auto host_flags = nb::cast<Board>(flags.attr("host")), words = nb::cast<Board>(board.attr("words"));
    const nb::handle epilogue = list.attr("epilogue");
    const Program program{.operations = operations.records<Operation>(),
                          .operands = operands.records<cuda::Operand>(),
                          .addresses = {addresses.data(), addresses.size()},
                          .in_host = in_host.records<std::uint8_t>(),
                          .lanes = lanes.records<LaneRecord>(),
                          .num_events = nb::cast<std::size_t>(list.attr("num_events")),
                          .span = nb::cast<std::uint32_t>(list.attr("span")),
                          .own_flags = nb::cast<Address>(flags.attr("own")),
                          .peer_flags = {peer_flags.data(), peer_flags.size()},
                          .host_flags = host_flags.data(),
                          .board = words.data(),
                          .rank = nb::cast<std::size_t>(board.attr("rank")),
                          .kernel = std::move(kernel),
                          .files = std::move(files),
                          .same_sums = nb::cast<bool>(list.attr("same_sums")),
                          .vectors = nb::cast<std::array<Address, 2>>(list.attr("vectors")),
                          .activation = epilogue.is_none() ? std::int64_t{no_activation}
                                                           : nb::cast<std::int64_t>(epilogue.attr("activation_code"))};
    return std::make_shared<Executor>(std::move(device), program);
}

}  // namespace

#define FIELD(of, name) result.def_ro(#name, &of::name);

void bind_cuda(nb::module_ &m) {
    // The code is the exception's second argument, so that callers can tell out-of-memory.
    static PyObject *error_type = nullptr;
    error_type = PyErr_NewExceptionWithDoc(
        (nb::cast<std::string>(m.attr("__name__")) + ".CudaError").c_str(),
        "A CUDA or cuBLAS call failed; args are (message, code), code −1 where the system gave none.",
        PyExc_RuntimeError, nullptr);
    if (error_type == nullptr) nb::raise_python_error();
    m.attr("CudaError") = nb::borrow(error_type);
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Failure &failure) {
            const nb::tuple arguments = nb::make_tuple(failure.what(), failure.code);
            PyErr_SetObject(error_type, arguments.ptr());
        }
    });

    nb::class_<Driver>(m, "CudaDriver", "The CUDA driver's functions; loading it initialises nothing.")
        .def(nb::init<const std::string &>(), nb::arg("library") = "libcuda.so.1")
        .def(
            "uuid",
            [](const Driver &self, int ordinal) {
                const std::string bytes = self.uuid(ordinal);
                return nb::bytes(bytes.data(), bytes.size());
            },
            nb::arg("ordinal"));
    nb::class_<Blas>(m, "CudaBlas", "cuBLAS's functions, by default of the library loaded already.")
        .def(nb::init<const std::string &>(), nb::arg("library") = "")
        .def_prop_ro("path", &Blas::path);
    nb::class_<DeviceState>(m, "CudaDevice", "One device: its primary context, streams, handles and events.")
        .def(nb::init<std::shared_ptr<Driver>, std::shared_ptr<Blas>, int>(), nb::arg("driver"), nb::arg("blas"),
             nb::arg("ordinal"))
        .def_prop_ro("abandoned", &DeviceState::abandoned)
        .def_rw("copies_bytes", &DeviceState::copies_bytes)
        .def("reserve", &DeviceState::reserve, nb::arg("compute_lanes"), nb::arg("copy_lanes"), nb::arg("events"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("compute_stream", &DeviceState::compute_stream, nb::arg("number"))
        .def("mark_streams", &DeviceState::mark_streams, nb::arg("streams"), nb::call_guard<nb::gil_scoped_release>())
        .def("await_marks", &DeviceState::await_marks, nb::call_guard<nb::gil_scoped_release>())
        .def("fill_words", &DeviceState::fill_words, nb::arg("address"), nb::arg("count"), nb::arg("value"),
             nb::call_guard<nb::gil_scoped_release>())
        .def(
            "run_on_nothing",
            [](DeviceState &d, Address kernel) {
                CombineArguments nothing{};
                d.run_once(reinterpret_cast<Function>(kernel), &nothing);
            },
            nb::arg("kernel"), nb::call_guard<nb::gil_scoped_release>())
        .def("tune_products", &DeviceState::tune_products, nb::arg("least_operations"), nb::arg("timing"),
             nb::arg("most") = 1024)
        .def("tuned_products",
             [](const DeviceState &d) {
                 std::vector<std::tuple<std::vector<std::int64_t>, double, double>> found;
                 for (const auto &[shape, tuned] : d.tuned_products())
                     found.emplace_back(std::vector<std::int64_t>{shape.dtype, shape.dtype_c, shape.op_a, shape.op_b,
                                                                  shape.m, shape.n, shape.k},
                                        tuned.usual_s, tuned.best_s);
                 return found;
             })
        .def("pointer_attribute", &DeviceState::pointer_attribute, nb::arg("attribute"), nb::arg("address"))
        .def("close", &DeviceState::close, nb::call_guard<nb::gil_scoped_release>());

    nb::class_<RunResult> result(m, "CudaRunResult");
    FOR_EACH(FIELD, RunResult, error, operation, file_error, descriptor, fatal, stalled, aborted, times_s, host_times)
    result.def("add", [](RunResult &self, std::int64_t tasks, std::int64_t copy_bytes) {
        self.tasks += tasks;
        self.copy_bytes += copy_bytes;
    });
    result  // what every call reads
        .def_prop_ro("figures",
                     [](const RunResult &self) {
                         return std::make_tuple(self.tasks, self.copy_bytes, self.issue_s, self.drain_s);
                     })
        .def_prop_ro("went_well", [](const RunResult &self) {
            return self.error.empty() && self.file_error == 0 && !self.stalled && !self.aborted;
        });
    nb::class_<Run>(m, "CudaRun", "One run of an operation list, begun.")
        .def(nb::init<std::shared_ptr<Executor>, std::complex<double>, std::complex<double>, std::uint32_t, double,
                      bool, int>(),
             nb::call_guard<nb::gil_scoped_release>())
        .def("poll", &Run::poll, nb::arg("spin_s") = 0.0, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("may_be_followed", &Run::may_be_followed)
        .def("precede", &Run::precede, nb::arg("streams"), nb::call_guard<nb::gil_scoped_release>())
        .def("finish", [](Run &self) { return self.finish(); }, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Executor>(m, "CudaExecutor", "An operation list bound to addresses; keeps the device, not the board.")
        .def(nb::new_(&make_executor))
        .def(
            "run",
            [](Executor &self, std::complex<double> alpha, std::complex<double> beta, std::uint32_t epoch,
               double timeout_s, bool traced) {
                // The caller keeps it until this returns; sharing it with Python takes an allocation.
                const std::shared_ptr<Executor> kept(std::shared_ptr<Executor>(), &self);
                return Run(kept, alpha, beta, epoch, timeout_s, traced).finish();
            },
            nb::call_guard<nb::gil_scoped_release>())
        .def("prepare_trace", &Executor::prepare_trace, nb::call_guard<nb::gil_scoped_release>());
}

#undef FIELD

}  // namespace uncut
