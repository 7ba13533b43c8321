# Builds a project that takes this one in, runs its program, and installs the shared library from it for install_consumer.cmake.
# Wants: source_dir, work_dir, generator, architectures.
file(REMOVE_RECURSE ${work_dir})
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()
run(${CMAKE_COMMAND} -S ${source_dir}/tests/subproject -B ${work_dir}/build -G ${generator} -DCMAKE_BUILD_TYPE=Release
    -DFETCHCONTENT_SOURCE_DIR_STEPGRAPH=${source_dir} -DSTEPGRAPH_CUDA_ARCHITECTURES=${architectures} -DSTEPGRAPH_INSTALL=ON)
run(${CMAKE_COMMAND} --build ${work_dir}/build)
run(${work_dir}/build/parent)
set(build_dir ${work_dir}/build)
set(work_dir ${work_dir}/consumer)
include(${source_dir}/tests/install_consumer.cmake)
