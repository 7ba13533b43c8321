// The stepgraph command. Exit codes: 0 done, 1 failed while running (no GPU, a CUDA error, an output that cannot be
// written), 2 a command line, a case file or a trace that cannot be used.
#include <charconv>
#include <cstdint>
#include <exception>
#include <iostream>
#include <new>
#include <sstream>
#include <string>

#include <CLI/CLI.hpp>

#include <stepgraph/kernels/error.h>

#include "demo_command.h"
#include "graph_command.h"
#include "info_command.h"
#include "run_command.h"
#include "trace_command.h"

namespace {

using namespace stepgraph::tools;
using stepgraph::CacheFormat;

constexpr int failed = 1;
constexpr int unusable = 2;

Device device_named(const std::string& name) {
    return name == "cpu" ? Device::cpu : name == "cuda" ? Device::cuda : Device::automatic;
}

void add_device(CLI::App& command, Device& device) {
    command
        .add_option_function<std::string>(
            "--device", [&device](const std::string& name) { device = device_named(name); },
            "auto: the GPU where there is one, else the host")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->default_str("auto");
}

void add_format(CLI::App& command, CacheFormat& format) {
    command
        .add_option_function<std::string>(
            "--format", [&format](const std::string& name) { format = format_named(name).value(); },
            "Pages of the key cache")
        ->check(CLI::IsMember({"fp8", "fp8_mx", "mxfp4", "mxfp4_rowgroup"}))
        ->default_str("fp8");
}

/// CLI11's own takes what is not a number, "nan", for one of every range.
CLI::Validator real_number(double least, double most) {
    std::ostringstream range;
    range << least << " to " << most;
    const auto why_not = [least, most, words = range.str()](const std::string& text) {
        double value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool whole = error == std::errc() && end == text.data() + text.size();
        return whole && value >= least && value <= most ? std::string() : "Value " + text + " not in range " + words;
    };
    return {why_not, "in " + range.str()};
}

/// CLI11's own takes -1 for the largest number, and every one that is larger than it too.
void add_seed(CLI::App& command, uint64_t& seed) {
    const auto why_not = [](const std::string& text) {
        uint64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        return error == std::errc() && end == text.data() + text.size()
                   ? std::string()
                   : "Value " + text + " is not a whole number from 0 to 18446744073709551615";
    };
    command.add_option("--seed", seed, "Of all random data; 0: a fresh one")
        ->check(CLI::Validator(why_not, ""))
        ->capture_default_str();
}

void add_run(CLI::App& app, RunOptions& options, int& exit_code) {
    CLI::App* command = app.add_subcommand("run", "Run one case file through the whole step");
    command->add_option("case", options.case_path, "Case file (safetensors)")->required();
    command->add_option("--out", options.out, "Where the results go (safetensors)")->required();
    add_device(*command, options.device);
    CLI::Option* graph = command->add_flag_callback(
        "--graph", [&options] { options.launch = Launch::graph; }, "GPU: capture the step and replay it (the default)");
    command
        ->add_flag_callback(
            "--eager", [&options] { options.launch = Launch::eager; }, "GPU: enqueue the step on a plain stream")
        ->excludes(graph);
    command->add_flag("--logits", options.logits, "Also write every logit");
    command->add_flag("--physical", options.physical, "Also write the winners' slots");
    command->callback([&options, &exit_code] { exit_code = run(options); });
}

void add_demo(CLI::App& app, DemoOptions& options, int& exit_code) {
    CLI::App* command = app.add_subcommand("demo", "Decode a batch of requests from a trace and check every step");
    add_device(*command, options.device);
    add_format(*command, options.format);
    command->add_option("--steps", options.steps, "Steps to decode")->check(CLI::Range(1, 100000))->capture_default_str();
    command->add_option("--layers", options.layers, "Layers of a step")->check(CLI::Range(1, 128))->capture_default_str();
    command->add_option("--requests", options.requests, "Requests at a time")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    command->add_option("--top-k", options.top_k, "Positions selected per row")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    command->add_option("--shrink", options.shrink, "What the trace's lengths are divided by")
        ->check(CLI::Range(1, 100000))
        ->capture_default_str();
    command->add_flag("--portable-scorer", options.portable_scorer, "GPU: score with the kernel that runs everywhere");
    add_seed(*command, options.seed);
    command->callback([&options, &exit_code] { exit_code = demo(options); });
}

/// An option that is left to the device where it is not given.
void add_number(CLI::App& command, const char* name, int& number, int least, int most, const char* what) {
    command.add_option(name, number, what)->check(CLI::Range(least, most));
}

void add_trace(CLI::App& app, TraceOptions& options, int& exit_code) {
    CLI::App* command = app.add_subcommand(
        "trace", "Decode the requests of a trace as they come and go, and say what a step costs and how much is padding");
    command->add_option("trace", options.trace, "CSV: arrival_ms,input_tokens,output_tokens and a line a request")
        ->required();
    add_device(*command, options.device);
    add_format(*command, options.format);
    add_number(*command, "--steps", options.steps, 1, 10000000, "Most steps to decode; 2000 on a GPU, 400 on the host");
    add_number(*command, "--layers", options.layers, 1, 128, "Layers of a step; 4 on a GPU, 2 on the host");
    add_number(*command, "--rows", options.rows, 1, 1024,
               "Most rows of a step, and requests at a time; 64 on a GPU, 16 on the host");
    add_number(*command, "--top-k", options.top_k, 1, 4096, "Positions selected per row; 2048 on a GPU, 512 on the host");
    add_number(*command, "--max-model-len", options.max_model_len, 2, 1 << 20,
               "Tokens of the longest sequence; 131072 on a GPU, 4096 on the host");
    add_number(*command, "--pages", options.pages, 1, 1 << 24, "Pages of a layer's cache; 16384 on a GPU, 512 on the host");
    add_number(*command, "--shrink", options.shrink, 1, 100000,
               "What the trace's lengths are divided by; 1 on a GPU, 16 on the host");
    add_number(*command, "--check", options.check, 0, 10000000,
               "Steps that are checked in every row against the reference, the first and others drawn at random; 3");
    command->add_option("--step-ms", options.step_ms, "Milliseconds that the whole model takes for a step")
        ->check(real_number(0.001, 1e6))
        ->capture_default_str();
    command->add_option("--drafts", options.drafts, "Most verify rows of a request beside its own row")
        ->check(CLI::Range(0, 63))
        ->capture_default_str();
    command->add_option("--acceptance", options.acceptance, "Of a drafted token, where those before it were accepted")
        ->check(real_number(0, 1))
        ->capture_default_str();
    command->add_flag("--json", options.json, "Print the totals as JSON in place of the table");
    command->add_flag("--portable-scorer", options.portable_scorer, "GPU: score with the kernel that runs everywhere");
    add_seed(*command, options.seed);
    command->callback([&options, &exit_code] { exit_code = trace(options); });
}

void add_shape(CLI::App& command, ModelShape& shape) {
    command.add_option("--heads", shape.heads, "Indexer heads: 16, 32 or 64")->capture_default_str();
    command.add_option("--top-k", shape.top_k, "Positions selected per row")->capture_default_str();
    command.add_option("--rows", shape.rows, "Query rows of the bucket")->capture_default_str();
    command.add_option("--max-model-len", shape.max_model_len, "Tokens of the longest sequence")
        ->check(CLI::Range(int64_t{1}, int64_t{INT32_MAX}))
        ->capture_default_str();
    command.add_option("--dcp-world-size", shape.dcp_world_size, "Ranks that share a sequence")->capture_default_str();
    command.add_option("--tile-rows", shape.tile_rows, "Rows of a tile; 0: the default")->capture_default_str();
    add_format(command, shape.format);
    command.add_flag("--engine-projects", shape.engine_projects, "The engine hands iq and projected over");
}

void add_graph(CLI::App& app, GraphOptions& options, int& exit_code) {
    CLI::App* command = app.add_subcommand("graph", "Capture a step and print its nodes and edges (needs a GPU)");
    add_shape(*command, options.shape);
    command->add_option("--layers", options.layers, "Layers of the step")->capture_default_str();
    command->add_flag("--full-edges", options.shape.full_edges, "Without programmatic edges");
    command->add_flag("--portable-scorer", options.shape.portable_scorer, "Score with the kernel that runs everywhere");
    command->add_flag("--dot", options.dot, "Print Graphviz's language instead of a table");
    command->callback([&options, &exit_code] { exit_code = graph(options); });
}

void add_info(CLI::App& app, ModelShape& shape, int& exit_code) {
    CLI::App* command = app.add_subcommand("info", "Say what this build is, which GPUs it finds and what a shape costs");
    add_shape(*command, shape);
    command->callback([&shape, &exit_code] { exit_code = info(shape); });
}

int parse_and_run(int argc, char** argv) {
    CLI::App app("The decode step of a sparse-attention indexer as one captured CUDA graph");
    app.set_version_flag("--version", "stepgraph " STEPGRAPH_VERSION);
    int exit_code = 0;
    RunOptions run_options;
    DemoOptions demo_options;
    TraceOptions trace_options;
    GraphOptions graph_options;
    ModelShape info_shape;
    add_run(app, run_options, exit_code);
    add_demo(app, demo_options, exit_code);
    add_trace(app, trace_options, exit_code);
    add_graph(app, graph_options, exit_code);
    add_info(app, info_shape, exit_code);
    try {
        app.parse(argc, argv);
        if (app.get_subcommands().empty()) {  // asked here: the parser would say so too of a word that is none
            throw CLI::RequiredError("A subcommand");
        }
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : unusable;  // 0: help or version was asked for
    }
    return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return parse_and_run(argc, argv);
    } catch (const CaseError& error) {
        std::cerr << "stepgraph: " << error.what() << "\n";
        return unusable;
    } catch (const stepgraph::Error& error) {
        std::cerr << "stepgraph: " << error.what() << "\n";
        return error.code() == stepgraph::ErrorCode::invalid_geometry ? unusable : failed;
    } catch (const std::bad_alloc&) {
        std::cerr << "stepgraph: there is not enough memory for this step\n";
        return failed;
    } catch (const std::exception& error) {
        std::cerr << "stepgraph: " << error.what() << "\n";
        return failed;
    }
}
