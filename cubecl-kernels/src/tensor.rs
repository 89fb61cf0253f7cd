use cubecl::{client::Client, ir::ElemType, prelude::*, server::Handle};

use crate::KernelError;

/// A contiguous row-major tensor on a device: the one argument type of all operations here.
///
/// It is a handle (shared when cloned), a shape and an element type. `cubecl-std`'s `TensorHandle`
/// is not used because it also carries strides, which no kernel of this crate reads.
#[derive(Debug, Clone)]
pub struct DeviceTensor {
    handle: Handle,
    shape: Vec<usize>,
    dtype: ElemType,
}

impl DeviceTensor {
    /// Wraps a buffer that lies on the device already.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the buffer holds fewer bytes than the shape asks for.
    pub fn new(
        handle: Handle,
        shape: impl Into<Vec<usize>>,
        dtype: ElemType,
    ) -> Result<Self, KernelError> {
        let shape = shape.into();
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let held = handle.size_in_used();
        if held < bytes as u64 {
            return Err(KernelError::Shape {
                argument: "handle",
                shape,
                allowed: format!("at most {held} bytes of {dtype}"),
            });
        }
        Ok(Self {
            handle,
            shape,
            dtype,
        })
    }

    /// A buffer whose contents are undefined until something is written.
    pub fn empty(client: &Client, shape: impl Into<Vec<usize>>, dtype: ElemType) -> Self {
        let shape = shape.into();
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self {
            handle: client.empty(allocated(bytes)),
            shape,
            dtype,
        }
    }

    /// A buffer of zeros, which the device writes.
    pub fn zeros(client: &Client, shape: impl Into<Vec<usize>>, dtype: ElemType) -> Self {
        let tensor = Self::empty(client, shape, dtype);
        // All bytes of a zero are zero in every element type, so words will do.
        let words = tensor.handle.size_in_used() as usize / size_of::<u32>();
        let units = client.properties().hardware.max_units_per_cube.min(256);
        let most_cubes = client.properties().hardware.max_cube_count.0;
        let cubes = (words.div_ceil(units as usize))
            .min(4096)
            .min(most_cubes as usize);
        // SAFETY: the buffer holds `words` words, and the kernel stays below the length.
        unsafe {
            zero_kernel::launch_unchecked(
                client,
                CubeCount::new_1d(cubes as u32),
                CubeDim::new_1d(units),
                AddressType::from_len(words),
                BufferArg::from_raw_parts(tensor.handle.clone(), words),
                words,
            );
        }
        tensor
    }

    /// Copies `data` to the device.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the shape does not hold exactly the elements of `data`.
    pub fn from_data<T: CubeElement>(
        client: &Client,
        data: &[T],
        shape: impl Into<Vec<usize>>,
    ) -> Result<Self, KernelError> {
        let shape = shape.into();
        if shape.iter().product::<usize>() != data.len() {
            return Err(KernelError::Shape {
                argument: "data",
                shape,
                allowed: format!("shapes of {} elements", data.len()),
            });
        }
        let mut bytes = T::as_bytes(data).to_vec();
        bytes.resize(allocated(bytes.len()), 0);
        Ok(Self {
            handle: client.create_from_slice(&bytes),
            shape,
            dtype: T::cube_type(),
        })
    }

    /// Waits for the work queued before, and copies the tensor to the host.
    ///
    /// # Errors
    /// [`KernelError::Dtype`] when `T` is not the tensor's element type; [`KernelError::Read`]
    /// when the device reports a failure, of this read or of a kernel queued before.
    pub fn read<T: CubeElement>(&self, client: &Client) -> Result<Vec<T>, KernelError> {
        if T::cube_type() != self.dtype {
            return Err(KernelError::Dtype {
                argument: "tensor",
                dtype: self.dtype,
                allowed: T::cube_type().to_string(),
            });
        }
        let bytes = client
            .read_one(self.handle.clone())
            .map_err(|error| KernelError::Read {
                argument: "tensor",
                message: error.to_string(),
            })?;
        Ok(T::from_bytes(&bytes[..self.len() * self.dtype.size()]).to_vec())
    }

    /// The buffer.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The buffer, given up.
    pub fn into_handle(self) -> Handle {
        self.handle
    }

    /// The sizes of the dimensions, the outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> ElemType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffer as a kernel argument, in elements of the tensor's type. A kernel that declares
    /// `&[Vector<F, N>]` divides the length itself.
    pub(crate) fn arg(&self) -> BufferArg {
        // SAFETY: `new` and the other constructors guarantee that the buffer holds the elements.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.len()) }
    }
}

/// Bytes to reserve: never none, because a runtime may refuse an empty buffer, and whole vectors
/// of 16 bytes, because some runtimes copy in words.
fn allocated(bytes: usize) -> usize {
    bytes.next_multiple_of(16).max(16)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn zero_kernel(words: &mut [u32], len: usize) {
    let stride = CUBE_COUNT * CUBE_DIM as usize;
    let mut position = ABSOLUTE_POS;
    while position < len {
        words[position] = 0;
        position += stride;
    }
}
