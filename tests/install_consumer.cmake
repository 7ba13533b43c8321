# Installs the library into an empty folder, builds the examples against it with find_package, and runs them.
# Wants: build_dir, source_dir, work_dir, generator.
file(REMOVE_RECURSE ${work_dir})
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()
run(${CMAKE_COMMAND} --install ${build_dir} --prefix ${work_dir}/installed)
foreach(example minimal engine)
  run(${CMAKE_COMMAND} -S ${source_dir}/examples/${example} -B ${work_dir}/${example} -G ${generator}
      -DCMAKE_PREFIX_PATH=${work_dir}/installed -DCMAKE_BUILD_TYPE=Release)
  run(${CMAKE_COMMAND} --build ${work_dir}/${example})
  run(${work_dir}/${example}/${example})
endforeach()
