# Builds a project that takes this one in, runs its program, and installs the shared library from it for install_consumer.cmake.
# Wants: source_dir, work_dir, generator, architectures.
include(${CMAKE_CURRENT_LIST_DIR}/run_or_fail.cmake)
file(REMOVE_RECURSE ${work_dir})
run_or_fail(${CMAKE_COMMAND} -S ${source_dir}/tests/subproject -B ${work_dir}/build -G ${generator} -DCMAKE_BUILD_TYPE=Release
    -DFETCHCONTENT_SOURCE_DIR_STEPGRAPH=${source_dir} -DSTEPGRAPH_CUDA_ARCHITECTURES=${architectures} -DSTEPGRAPH_INSTALL=ON)
run_or_fail(${CMAKE_COMMAND} --build ${work_dir}/build)
run_or_fail(${work_dir}/build/parent)
set(build_dir ${work_dir}/build)
set(work_dir ${work_dir}/consumer)
include(${source_dir}/tests/install_consumer.cmake)
