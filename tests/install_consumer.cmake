# Installs the library into an empty folder, builds examples/minimal against it with find_package, and runs it.
# Wants: build_dir, source_dir, work_dir, generator.
file(REMOVE_RECURSE ${work_dir})
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()
run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/installed)
run(${CMAKE_COMMAND} -S ${source_dir}/examples/minimal -B ${work_dir}/build -G ${generator}
    -DCMAKE_PREFIX_PATH=${work_dir}/installed -DCMAKE_BUILD_TYPE=Release)
run(${CMAKE_COMMAND} --build ${work_dir}/build)
run(${work_dir}/build/minimal)
